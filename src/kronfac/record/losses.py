"""Recorded loss calls, and the mini-batch that they make with the calls of the model before them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kronfac.errors import KronfacError, UnsupportedLossError
from kronfac.model.nested import refs_of
from kronfac.objective import Objective
from kronfac.record.batch import Batch, LossCall, ModelCall, Pass, Step
from kronfac.record.tape import Record, steps_of


@dataclass(eq=False)
class SeenLoss:
    """A loss call, and the steps that lead to it."""

    call: LossCall
    """With its value, but None if the outputs were declared with `kronfac.observe`."""
    number: int
    """Its place among other losses."""
    record: Record
    outside: dict[int, torch.Size] = field(default_factory=dict)
    """Shapes, by id, of leaves that it depends on, that require a gradient and are not the model's."""

    def with_factor(self, arrived: Tensor | None) -> LossCall | None:
        """The call with its factor in the objective: the gradient that arrived at it; None if none did."""
        value = self.call.value
        if value is None:
            return self.call
        if arrived is None:
            return None
        factor: float | Tensor = arrived
        if not arrived.is_cuda:
            least = float(arrived.min())
            if arrived.dim() == 0:
                factor = least
            if least < 0:
                raise UnsupportedLossError(
                    "KFAC needs losses that are minimised; one of those that were called enters "
                    f"the objective with the factor {least:g}, which has no positive curvature. Leave it "
                    "out, or declare the terms that are minimised with kronfac.observe."
                )
        terms = self.call.terms
        # A loss without a reduction: the gradient at each element is its weight.
        own = terms.weighed_by(arrived) if arrived.dim() else terms.scaled(factor)
        return replace(self.call, terms=own, value=(value * arrived).sum(), factor=factor)


def assemble(
    losses: Mapping[SeenLoss, Tensor | None],
    others: Sequence[Record],
    objective: Objective,
    changed: KronfacError,
) -> Batch | None:
    """The mini-batch of loss calls; without any, the calls of the model with the loss given to KFAC.

    Args:
        losses: with the gradients that arrived at them.
        others: calls of the model, which count if there are no losses.
        objective: the loss that KFAC was given.
        changed: the error to raise if inputs or targets were written to since.

    Returns:
        None if there is neither.
    """
    seen = sorted(losses, key=lambda one: one.number)
    records = [one.record for one in seen] or others
    versions = (pair for one in records for part in one.whole() for pair in part.versions)
    if any(tensor._version != version for tensor, version in versions):
        raise changed
    steps = steps_of(records)
    if not steps:
        return None
    mixed = any(one.mixed for one in records)
    calls = [call for one in seen if (call := one.with_factor(losses[one])) is not None]
    if not calls:
        return Batch(_declare(steps, objective), seen=False, assumed=True, mixed=mixed)
    complete = all(call.function is not None for call in calls)
    outside = {key: shape for one in seen for key, shape in one.outside.items()}
    return Batch(_group(steps, calls), complete, mixed=mixed, outside=tuple(outside.values()))


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
