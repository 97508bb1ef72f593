"""K-FAC's own closure, which `KFAC.closure` makes for one mini-batch."""

import torch
from torch import Tensor, nn

from kronfac.errors import TargetError
from kronfac.objective import Objective


class MiniBatchClosure:
    """Loss and gradient of one mini-batch, by micro-batches of `chunk` examples.

    The gradients are those of one pass over all examples, up to rounding: with a mean loss every chunk
    is weighed by its share of the examples, or of what the mean divides by if targets are ignored or
    classes are weighted.
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        x: Tensor | tuple[Tensor, ...],
        y: Tensor,
        chunk: int | None,
    ) -> None:
        self.inputs = x if isinstance(x, tuple) else (x,)
        for value in (*self.inputs, y):
            if not isinstance(value, Tensor):
                raise TypeError(
                    f"KFAC.closure takes tensors; got a {type(value).__module__}."
                    f"{type(value).__name__}. torch.as_tensor makes one."
                )
        if any(len(arg) != len(y) for arg in self.inputs):
            lengths = ", ".join(str(len(arg)) for arg in self.inputs)
            raise TargetError(
                f"KFAC.closure needs as many targets as inputs; got {len(y)} targets for {lengths} inputs."
            )
        if len(y) == 0:
            raise ValueError(
                "KFAC.closure needs at least one example; got none. Leave out empty mini-batches."
            )
        if chunk is not None and chunk < 1:
            raise ValueError(
                f"KFAC.closure's chunk is a number of examples, 1 or more; got {chunk}."
            )
        self._model = model
        self.objective = objective
        """Each `KFAC` has its own: a closure with another objective belongs to another `KFAC`."""
        self.targets = y
        self._chunk = chunk or len(y)

    def __call__(self) -> Tensor:
        """The loss over the whole mini-batch; gradients are left in the parameters."""
        for p in self._model.parameters():
            p.grad = None
        examples = len(self.targets)
        total = torch.zeros((), device=self.targets.device)
        weighed = self.objective.mean and self._chunk < examples
        whole = self.objective.denominator(self.targets) if weighed else 1.0
        for start in range(0, examples, self._chunk):
            part = slice(start, start + self._chunk)
            targets = self.targets[part]
            share = self.objective.denominator(targets) / whole if weighed and whole else 1.0
            if share == 0:
                continue  # all of its targets are ignored
            loss = self.objective.loss(self._model(*(arg[part] for arg in self.inputs)), targets)
            (loss * share).backward()
            total = total + loss.detach() * share
        return total

    @property
    def whole(self) -> bool:
        """Whether one pass covers all examples."""
        return self._chunk >= len(self.targets)
