"""Recorded loss calls, and the mini-batch that they make with the calls of the model before them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kronfac.errors import KronfacError, UnsupportedLossError
from kronfac.model.nested import refs_of
from kronfac.objective import Objective
from kronfac.record.batch import Batch, LossCall, ModelCall, Pass, Step


@dataclass(eq=False)
class Record:
    """What a closure did; in a loop, one call of the model or the loss, after those that it depends on."""

    steps: list[Step]
    versions: list[tuple[Tensor, int]]
    """Tensors that the steps were given, with their versions at that time."""
    mixed: bool
    """Whether they ran in half precision."""
    number: int = 0
    """Its place among other records."""
    read: bool = False
    """Whether a loss of the outputs was recorded."""


@dataclass(eq=False)
class SeenLoss:
    """A loss call, the gradient that arrived at it, and the steps that lead to it."""

    call: LossCall
    value: Tensor | None
    """The loss; None if the outputs were declared with `kronfac.observe`."""
    number: int
    """Its place among other losses."""
    record: Record | None = None
    """The steps before it, from the model on."""
    arrived: Tensor | None = None
    inside: bool = False
    """Whether the model called it."""
    outside: dict[int, torch.Size] = field(default_factory=dict)
    """Shapes, by id, of leaves that it depends on, that require a gradient and are not the model's."""

    def arrive(self, gradient: Tensor) -> None:
        """Add the gradient of a backward pass."""
        self.arrived = gradient if self.arrived is None else self.arrived + gradient

    def with_factor(self) -> LossCall | None:
        """The call with its factor in the objective; None if no gradient arrived at it."""
        if self.value is None:
            return self.call
        if self.arrived is None:
            return None
        factor: float | Tensor = self.arrived
        if not self.arrived.is_cuda:
            least = float(self.arrived.min())
            if self.arrived.dim() == 0:
                factor = least
            if least < 0:
                raise UnsupportedLossError(
                    "KFAC needs losses that are minimised; one of those that were called enters "
                    f"the objective with the factor {least:g}, which has no positive curvature. Leave it "
                    "out, or declare the terms that are minimised with kronfac.observe."
                )
        terms = self.call.terms
        # A loss without a reduction: the gradient at each element is its weight.
        own = terms.weighed_by(self.arrived) if self.arrived.dim() else terms.scaled(factor)
        value = (self.value * self.arrived).sum()
        return replace(self.call, terms=own, value=value, factor=factor)


def joined(records: Iterable[Record]) -> list[Step]:
    """The steps of several records, each once; a step comes after those that it depends on."""
    return list({id(step): step for one in records for step in one.steps}.values())


def assemble(
    losses: Sequence[SeenLoss],
    others: Sequence[Record],
    objective: Objective,
    changed: KronfacError,
) -> Batch | None:
    """The mini-batch of loss calls; without any, the calls of the model with the loss given to KFAC.

    Args:
        losses: in any order.
        others: calls of the model, which count if there are no losses.
        objective: the loss that KFAC was given.
        changed: the error to raise if inputs or targets were written to since.

    Returns:
        None if there is neither.
    """
    losses = sorted(losses, key=lambda seen: seen.number)
    found = [seen.record for seen in losses if seen.record is not None]
    records = list(dict.fromkeys(found or sorted(others, key=lambda record: record.number)))
    if not records:
        return None
    if any(tensor._version != version for one in records for tensor, version in one.versions):
        raise changed
    steps, mixed = joined(records), any(one.mixed for one in records)
    calls = [call for seen in losses if (call := seen.with_factor()) is not None]
    if not calls:
        return Batch(_declare(steps, objective), seen=False, assumed=True, mixed=mixed)
    seen = all(call.function is not None for call in calls)
    outside = {key: shape for one in losses for key, shape in one.outside.items()}
    return Batch(_group(steps, calls), seen=seen, mixed=mixed, outside=tuple(outside.values()))


def _group(steps: Sequence[Step], losses: Sequence[LossCall]) -> tuple[Pass, ...]:
    """One pass for every set of loss calls that share a call of the model."""
    producers = _producers(steps)
    passes: list[tuple[set[int], list[LossCall]]] = []
    for loss in losses:
        needed, together = _needed(steps, [loss.input], producers), [loss]
        for other in [p for p in passes if p[0] & needed]:
            passes.remove(other)
            needed, together = needed | other[0], other[1] + together
        passes.append((needed, together))
    return tuple(
        Pass(tuple(steps[n] for n in sorted(needed)), tuple(together))
        for needed, together in passes
    )


def _declare(steps: Sequence[Step], objective: Objective) -> tuple[Pass, ...]:
    """Passes whose loss was not recorded: the curvature of KFAC's loss at the model's outputs.

    If parts of the model were called, at the outputs of those that no other part uses.
    """
    producers = _producers(steps)
    calls = {n: step for n, step in enumerate(steps) if isinstance(step, ModelCall)}
    sources = {n: _needed(steps, refs_of((c.args, c.kwargs)), producers) for n, c in calls.items()}
    passes = []
    for n, call in calls.items():
        if any(n in others for others in sources.values()):
            continue
        # A number is no prediction: models that compute their own loss return it first.
        outputs = list(zip(call.outputs, call.shapes, strict=True))
        prediction, shape = next((pair for pair in outputs if len(pair[1])), outputs[0])
        own = tuple(steps[i] for i in sorted({n} | sources[n]))
        passes.append(Pass(own, (LossCall(prediction, objective.declare(shape)),)))
    if not objective.mean:
        return tuple(passes)
    # Each call is a micro-batch of the same objective.
    total = sum(part.examples for part in passes)
    return tuple(
        Pass(part.steps, (part.losses[0].scaled(part.examples / total),)) for part in passes
    )


def _producers(steps: Sequence[Step]) -> dict[int, int]:
    """For the index of every tensor, the number of the step that computes it."""
    return {
        index: n
        for n, step in enumerate(steps)
        for index in step.outputs + (step.losses if isinstance(step, ModelCall) else ())
    }


def _needed(steps: Sequence[Step], wanted: Iterable[int], producers: dict[int, int]) -> set[int]:
    """The numbers of the steps that compute these tensors."""
    needed: set[int] = set()
    stack = list(wanted)
    while stack:
        number = producers[stack.pop()]
        if number not in needed:
            needed.add(number)
            stack += refs_of((steps[number].args, steps[number].kwargs))
    return needed
