"""What `torch.amp.GradScaler` tells an optimizer that unscales gradients itself.

It sets `found_inf` and `grad_scale` for the time of a step; `grad_scale` is None if `unscale_` was called
before.
"""

from dataclasses import dataclass

from torch import Tensor, nn

UNSCALED_BY = "_unscaled_by"
"""The attribute of an optimizer, for the time of one step, that says what gradients were divided by."""


@dataclass(frozen=True)
class Scaling:
    """How the gradients were scaled."""

    active: bool = False
    """Whether a GradScaler takes the step."""
    overflow: bool = False
    """Whether it has found gradients that are not finite."""
    scale: float | None = None
    """What the gradients are still multiplied by; None if they no longer are."""
    before: float | None = None
    """What they were multiplied by before somebody who has said so divided by it."""

    @property
    def unscaled(self) -> bool:
        """Whether gradients were scaled by nobody knows what, and no longer are."""
        return self.active and self.scale is None and self.before is None

    @classmethod
    def of(cls, optimizer: object) -> "Scaling":
        """What a GradScaler has set on an optimizer."""
        found: Tensor | None = getattr(optimizer, "found_inf", None)
        if found is None:
            return cls()
        scale: Tensor | None = getattr(optimizer, "grad_scale", None)
        before: float | None = getattr(optimizer, UNSCALED_BY, None)
        return cls(True, float(found) > 0, None if scale is None else float(scale), before)

    def unscale(self, parameters: list[nn.Parameter]) -> None:
        """Divide the gradients by the scale, in place."""
        if self.scale is not None:
            for p in parameters:
                if p.grad is not None:
                    p.grad.div_(self.scale)
