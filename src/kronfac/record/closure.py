"""Closures: recorded as a whole, and made by `KFAC.closure` for one mini-batch in micro-batches."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from kronfac.errors import ClosureError, LoopError, TargetError
from kronfac.model.own_pass import instead_of_checkpoints, not_reentrant
from kronfac.model.side_effects import Buffers, eager_modules, register_hooks, remove_hooks
from kronfac.objective import Objective
from kronfac.record.batch import Batch
from kronfac.record.losses import SeenLoss, assemble
from kronfac.record.mode import Recording


class ClosureRecording(Recording):
    """What happens inside a closure."""

    in_closure = True

    def __init__(self, model: nn.Module, objective: Objective, buffers: Buffers) -> None:
        arrived: dict[SeenLoss, Tensor] = {}

        def arrive(seen: SeenLoss, gradient: Tensor) -> None:
            arrived[seen] = arrived[seen] + gradient if seen in arrived else gradient

        super().__init__(model, objective, buffers, arrive)
        self._arrived = arrived

    def batch(self) -> Batch:
        """The mini-batch of the closure.

        Raises:
            ClosureError: the model was not called, or its inputs were changed afterwards.
        """
        changed = ClosureError(
            "The closure changed inputs or targets in place after it had called the model with them, "
            "but KFAC goes through the same examples again. Use a new tensor for every call."
        )
        losses = {seen: self._arrived.get(seen) for seen in self.losses}
        batch = assemble(losses, [self.record], self.objective, changed)
        if batch is None:
            raise ClosureError(
                f"The closure never called the model ({type(self.model).__name__}) with gradients "
                "enabled, so there is nothing to take a step from. Call the model that KFAC was "
                "given, in the closure; what it returns may be tensors, containers, or dataclasses of them."
            )
        return batch


@contextmanager
def record(
    model: nn.Module, objective: Objective, buffers: Buffers | None = None
) -> Iterator[ClosureRecording]:
    """Record everything that this thread does with the model and losses, inside this context.

    `buffers` are the model's, or those of the module inside it if it is compiled.
    """
    own: nn.Module = getattr(model, "_orig_mod", model)
    recording = ClosureRecording(model, objective, Buffers(own) if buffers is None else buffers)
    recording.paths = {module: path for path, module in eager_modules(model)}
    with ExitStack() as stack:
        for module in recording.paths:
            hooks = register_hooks(module, recording.before_model, recording.after_model)
            stack.callback(remove_hooks, hooks)
        stack.enter_context(instead_of_checkpoints(not_reentrant))
        stack.enter_context(recording)
        yield recording


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


def refuse_call(closure: object) -> None:
    """Refuse an argument of `step` that is no closure, and a step without gradients.

    Raises:
        TypeError: `closure` can't be called.
        LoopError: `torch.inference_mode` is on.
    """
    if closure is not None and not callable(closure):
        raise TypeError(
            "KFAC.step() takes a closure that computes the loss, or nothing; got a "
            f"{type(closure).__name__}. Call loss.backward(), then step() with no argument."
        )
    if torch.is_inference_mode_enabled():
        raise LoopError(
            "KFAC.step() needs gradients, but it is called in torch.inference_mode(), in which there are "
            "none. Train outside of it; it is for evaluation."
        )
