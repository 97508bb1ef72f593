"""Recorded loss calls, and the mini-batch that they make with the calls of the model before them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kronfac.errors import KronfacError, UnsupportedLossError
from kronfac.model.nested import refs_of
from kronfac.objective import Objective
from kronfac.record.batch import Batch, LossCall, ModelCall, Operation, Pass

Step = ModelCall | Operation
Versions = list[tuple[Tensor, int]]


@dataclass(eq=False)
class Record:
    """What a closure did with the model; in a loop, one call of the model with those that it depends on."""

    steps: list[Step]
    versions: Versions
    """Tensors that they were given, with their versions then."""
    shapes: dict[int, torch.Size]
    """Shapes of the tensors that they computed, by index."""
    mixed: bool
    """Whether they ran in half precision."""
    number: int = 0
    """Their place among other records."""
    read: bool = False
    """Whether a loss of their outputs was recorded."""


@dataclass(eq=False)
class SeenLoss:
    """A loss call, the gradient that arrived at it, and what computes it again."""

    call: LossCall
    loss: Tensor | None
    """Its value; None if the outputs were declared with `kronfac.observe`."""
    number: int
    """Its place among other losses."""
    arrived: Tensor | None = None
    records: list[Record] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    """Operations between the model and the loss."""
    versions: Versions = field(default_factory=list)
    inside: bool = False
    """Whether the model called it."""
    outside: dict[int, torch.Size] = field(default_factory=dict)
    """Shapes, by id, of leaves that it depends on, that require a gradient and are not the model's."""

    def arrive(self, gradient: Tensor) -> None:
        """Add the gradient of a backward pass."""
        self.arrived = gradient if self.arrived is None else self.arrived + gradient

    def with_factor(self) -> LossCall | None:
        """The call with its factor in the objective; None if nothing arrived at it."""
        if self.loss is None:
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
        # A loss without a reduction: how it is reduced is what arrives at each of its elements.
        own = terms.weighed_by(self.arrived) if self.arrived.dim() else terms.scaled(factor)
        value = (self.loss * self.arrived).sum()
        return replace(self.call, terms=own, value=value, factor=factor)


def joined(records: Sequence[Record], steps: Sequence[Step]) -> list[Step]:
    """The steps of several records in their order, each once, and further ones."""
    before = [step for one in sorted(records, key=lambda r: r.number) for step in one.steps]
    return list({id(step): step for step in (*before, *steps)}.values())


def assemble(
    losses: Sequence[SeenLoss],
    others: Sequence[Record],
    objective: Objective,
    changed: KronfacError,
) -> Batch | None:
    """The mini-batch of loss calls; without any, that of calls of the model, with the loss given to KFAC.

    Args:
        losses: in any order.
        others: calls of the model, which count if there are no losses.
        objective: the loss that KFAC was given.
        changed: the error to raise if inputs or targets were written to since.

    Returns:
        None if there is neither.
    """
    losses = sorted(losses, key=lambda seen: seen.number)
    records = [one for seen in losses for one in seen.records]
    records = records or sorted(others, key=lambda record: record.number)
    if not records:
        return None
    versions = [*(one.versions for one in records), *(seen.versions for seen in losses)]
    if any(tensor._version != version for given in versions for tensor, version in given):
        raise changed
    mixed = any(one.mixed for one in records)
    calls = [call for seen in losses if (call := seen.with_factor()) is not None]
    if not calls:
        shapes = {index: shape for one in records for index, shape in one.shapes.items()}
        passes = _declare(joined(records, []), shapes, objective)
        return Batch(passes, seen=False, assumed=True, mixed=mixed)
    steps = joined(records, [step for seen in losses for step in seen.steps])
    seen = all(call.function is not None for call in calls)
    outside = {key: shape for one in losses for key, shape in one.outside.items()}
    return Batch(_group(steps, calls), seen=seen, mixed=mixed, outside=tuple(outside.values()))


def _group(steps: Sequence[Step], losses: Sequence[LossCall]) -> tuple[Pass, ...]:
    """One pass for every set of loss calls that share a call of the model."""
    producers = {i: n for n, step in enumerate(steps) for i in _outputs(step)}
    passes: list[tuple[set[int], list[LossCall]]] = []
    for loss in losses:
        needed, together = _needed(steps, loss.input, producers), [loss]
        for other in [p for p in passes if p[0] & needed]:
            passes.remove(other)
            needed, together = needed | other[0], other[1] + together
        passes.append((needed, together))
    return tuple(
        Pass(tuple(steps[n] for n in sorted(needed)), tuple(together))
        for needed, together in passes
    )


def _declare(
    steps: Sequence[Step], shapes: dict[int, torch.Size], objective: Objective
) -> tuple[Pass, ...]:
    """Passes without a loss call that was seen: the loss module's curvature at the model's outputs.

    If parts of the model were called, at the outputs of those that no other part goes on with.
    """
    producers = {i: n for n, step in enumerate(steps) for i in _outputs(step)}
    calls = {n: step for n, step in enumerate(steps) if isinstance(step, ModelCall)}
    sources = {n: _sources(steps, call, producers) for n, call in calls.items()}
    passes = []
    for n, call in calls.items():
        if any(n in others for others in sources.values()):
            continue
        # A number is no prediction: models that compute their own loss return it first.
        prediction = next((i for i in call.outputs if len(shapes[i])), call.outputs[0])
        terms = objective.declare(shapes[prediction])
        own = tuple(steps[i] for i in sorted({n} | sources[n]))
        passes.append(Pass(own, (LossCall(prediction, terms),)))
    if not objective.mean:
        return tuple(passes)
    # Each call is a micro-batch of the same objective.
    total = sum(part.examples for part in passes)
    return tuple(
        Pass(part.steps, (part.losses[0].scaled(part.examples / total),)) for part in passes
    )


def _needed(steps: Sequence[Step], index: int, producers: dict[int, int]) -> set[int]:
    """The steps that a tensor is computed by."""
    number = producers[index]
    return {number} | _sources(steps, steps[number], producers)


def _sources(steps: Sequence[Step], step: Step, producers: dict[int, int]) -> set[int]:
    """The steps that what a step is given is computed by."""
    needed: set[int] = set()
    wanted = _inputs(step)
    while wanted:
        number = producers[wanted.pop()]
        if number not in needed:
            needed.add(number)
            wanted += _inputs(steps[number])
    return needed


def _inputs(step: Step) -> list[int]:
    written = [before for before, _ in step.written] if isinstance(step, Operation) else []
    return refs_of((step.args, step.kwargs)) + written


def _outputs(step: Step) -> tuple[int, ...]:
    if isinstance(step, ModelCall):
        return step.outputs + step.losses
    return step.outputs + tuple(after for _, after in step.written)
