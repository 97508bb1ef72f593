"""Lightning: `configure_optimizers` returns a `KFAC`, and nothing else is needed.

Lightning passes a closure to `step`; with `accumulate_grad_batches` it computes the last of several
micro-batches. Only `precision="16-mixed"` together with `gradient_clip_val` needs a plugin, because
Lightning refuses to clip gradients for optimizers that unscale them themselves, as `KFAC` does.
"""

from typing import Any

from kronfac.kfac import KFAC
from kronfac.step.collect import UNSCALED_BY


def half_precision(device: str = "cuda", **options: Any) -> Any:
    """A precision plugin for `Trainer(plugins=…)`: float16, gradients unscaled before they are clipped.

    Use it instead of `precision="16-mixed"` if you need `gradient_clip_val`.

    Args:
        device: of `torch.autocast`.
        **options: of Lightning's `MixedPrecision`, such as `scaler`.
    """
    from lightning.pytorch.plugins import MixedPrecision  # noqa: PLC0415

    class UnscalingPrecision(MixedPrecision):  # type: ignore[misc, unused-ignore]
        """Unscales the gradients of a `KFAC` before they are clipped."""

        def clip_gradients(
            self, optimizer: Any, clip_val: Any = 0.0, *given: Any, **named: Any
        ) -> None:
            if clip_val and clip_val > 0 and isinstance(optimizer, KFAC):
                scaler: Any = self.scaler
                setattr(optimizer, UNSCALED_BY, scaler.get_scale())
                scaler.unscale_(optimizer)
                # Past the refusal, which is of gradients that are still scaled.
                super(MixedPrecision, self).clip_gradients(optimizer, clip_val, *given, **named)
            else:
                super().clip_gradients(optimizer, clip_val, *given, **named)

        def optimizer_step(self, optimizer: Any, *given: Any, **named: Any) -> Any:
            try:
                return super().optimizer_step(optimizer, *given, **named)
            finally:
                vars(optimizer).pop(UNSCALED_BY, None)

    return UnscalingPrecision("16-mixed", device, **options)
