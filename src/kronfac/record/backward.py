"""Which gradients a backward pass has left, and whether they are still there.

A hook calls `BackwardWatch.begin` in the middle of a backward pass. When that ends, torch calls back:
gradients that it has written to are known by their versions from then on.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.weak import WeakTensorKeyDictionary


class BackwardWatch:
    """Versions of gradients at the end of the last backward pass, and at the last step."""

    def __init__(self, parameters: Sequence[nn.Parameter], ended: Callable[[bool], None]) -> None:
        self._parameters = parameters
        self._ended = ended
        """Called at the end, with whether gradients were written: `autograd.grad` writes none."""
        self._before: list[tuple[Tensor | None, int]] | None = None
        self._left: Any = WeakTensorKeyDictionary()
        self._stepped: Any = WeakTensorKeyDictionary()
        self.passes = 0
        """Backward passes since the last step."""
        self.added_to_old = False
        """Whether the first of them has added to gradients that the last step went by."""

    def begin(self) -> bool:
        """Whether a new backward pass has begun, and there were no gradients before it."""
        if self._before is not None:
            return False
        self._before = self._gradients()
        # After the callbacks of this pass: DistributedDataParallel writes gradients in its own.
        queue = Variable._execution_engine.queue_callback
        queue(lambda: queue(self._end))
        return all(gradient is None for gradient, _ in self._before)

    def give_up(self) -> None:
        """Forget a backward pass that has failed."""
        self._before = None

    def _end(self) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        now = self._gradients()
        written = any(
            g is not old or v != version for (g, v), (old, version) in zip(now, before, strict=True)
        )
        if written:
            old = (self._stepped.get(g) == version for g, version in before if g is not None)
            self.added_to_old = self.added_to_old or (not self.passes and any(old))
            self.passes += 1
            self._left = _versions(now)
        self._ended(written)

    def step(self) -> None:
        """A step goes by the gradients as they are."""
        self._stepped = _versions(self._gradients())
        self.passes, self.added_to_old = 0, False

    def dropped(self) -> bool:
        """Whether the gradients of backward passes since the last step were dropped, or zeroed in place."""
        if not self.passes:
            return False
        now = self._gradients()
        if all(g is None for g, _ in now):
            return True
        touched = any(g is not None and self._left.get(g, v) != v for g, v in now)
        return touched and not any(g is not None and bool(g.any()) for g, _ in now)

    def any_gradient(self) -> bool:
        """Whether a parameter has a gradient, from wherever."""
        return any(p.grad is not None for p in self._parameters)

    def only_zeros(self) -> bool:
        """Whether there are gradients, and all of them are zero."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        return bool(grads) and not any(bool(grad.any()) for grad in grads)

    def _gradients(self) -> list[tuple[Tensor | None, int]]:
        grads = [p.grad for p in self._parameters]
        return [(None, 0) if g is None else (g, g._version) for g in grads]


def _versions(gradients: Sequence[tuple[Tensor | None, int]]) -> Any:
    versions = WeakTensorKeyDictionary()
    for gradient, version in gradients:
        if gradient is not None:
            versions[gradient] = version
    return versions
