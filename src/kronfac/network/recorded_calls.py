"""Calls of the model and of losses that a loop made, one by one, and the mini-batch that they are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.errors import LoopError
from kronfac.network.assembly import SeenLoss, Step, declare, group
from kronfac.network.between import Found
from kronfac.network.program import Batch
from kronfac.network.recorder import Recording
from kronfac.network.side_effects import Buffers
from kronfac.network.tape import Tape
from kronfac.objective import Objective

Versions = list[tuple[Tensor, int]]


@dataclass(eq=False)
class Calls:
    """A call of the model, with earlier ones whose outputs it was given."""

    steps: list[Step]
    versions: Versions
    """Tensors that they were given, with their versions then."""
    shapes: dict[int, torch.Size]
    """Shapes of what they computed, by their indices."""
    mixed: bool
    """Whether they ran in half precision."""
    number: int
    """They are in the order of these."""
    read: bool = False
    """Whether a loss has been seen that is about their outputs."""


@dataclass(eq=False)
class Arrival(SeenLoss):
    """A loss call, with all that it takes to compute it again."""

    calls: list[Calls] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """Operations between the model and the loss."""
    versions: Versions = field(default_factory=list)
    number: int = 0
    inside: bool = False
    """Whether the model called it."""


class CallRecording(Recording):
    """What happens inside of one call of the model or of the loss."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        buffers: Buffers,
        indices: Iterator[int],
        arrive: Callable[[Arrival, Tensor], None],
        mode: bool,
    ) -> None:
        super().__init__(model, objective, buffers, Tape(model, indices))
        self.arrivals: list[Arrival] = []
        """The losses that were called."""
        self.sources: list[Calls] = []
        """Earlier calls of the model whose outputs it was given."""
        self.buffer_versions: dict[str, tuple[int, int]] = {}
        """Versions of the model's buffers before the call."""
        self._indices = indices
        self._arrive = arrive
        self._mode = mode

    def enter(self) -> None:
        """See torch functions from now on."""
        if self._mode:
            self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """See them no longer."""
        if self._mode:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def recognize(self, found: Found, tensor: Tensor) -> None:
        """Know a tensor by how it was computed from the model's outputs."""
        self._tape.recognize(tensor, found.index)
        self.steps += found.operations
        self.sources.append(found.start.calls)

    @property
    def versions(self) -> Versions:
        """Tensors that it was given, with their versions."""
        return self._versions

    @property
    def shapes(self) -> dict[int, torch.Size]:
        """Shapes of the tensors that were computed, by their indices."""
        return self._tape.shapes

    def _suspend(self, module: nn.Module) -> None:
        pass  # in a compiled model there is no mode to suspend

    def _await_gradient(self, tensor: Tensor, seen: SeenLoss) -> None:
        # Not the recording itself: what holds on to this is the graph.
        arrival, arrive = Arrival(seen.call, seen.loss, number=next(self._indices)), self._arrive
        self.arrivals.append(arrival)
        if tensor.grad_fn is not None:
            tensor.register_hook(lambda gradient: arrive(arrival, gradient))


def joined(sources: Sequence[Calls], steps: Sequence[Step]) -> list[Step]:
    """Steps of earlier calls, each once, and further ones."""
    before = [step for calls in sorted(sources, key=_number) for step in calls.steps]
    return list({id(step): step for step in (*before, *steps)}.values())


def _number(record: Any) -> int:
    number: int = record.number
    return number


def assemble(
    arrivals: Sequence[Arrival], others: Sequence[Calls], objective: Objective
) -> Batch | None:
    """The mini-batch of loss calls; without any, that of calls of the model with a loss that is not seen.

    None if there is neither.

    Raises:
        LoopError: inputs or targets were changed since.
    """
    arrivals = sorted(arrivals, key=_number)
    calls = [one for arrival in arrivals for one in arrival.calls] or sorted(others, key=_number)
    if not calls:
        return None
    versions = [*(v for one in calls for v in one.versions)]
    versions += [v for arrival in arrivals for v in arrival.versions]
    if any(tensor._version != version for tensor, version in versions):
        raise LoopError(
            "Inputs or targets were changed in place after the model or the loss was called with them, but "
            "KFAC.step goes through the same examples again. Use a new tensor for every call, or call "
            "step() before you change them."
        )
    mixed = any(one.mixed for one in calls)
    if not arrivals:
        shapes = {index: shape for one in calls for index, shape in one.shapes.items()}
        passes = declare(joined(calls, []), shapes, objective)
        return Batch(passes, seen=False, assumed=True, mixed=mixed)
    steps = joined(calls, [step for arrival in arrivals for step in arrival.steps])
    losses = [loss for arrival in arrivals if (loss := arrival.with_factor()) is not None]
    seen = all(loss.function is not None for loss in losses)
    return Batch(group(steps, losses), seen=seen, mixed=mixed)
