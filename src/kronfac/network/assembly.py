"""From what was recorded to passes: loss calls with the steps that their outputs were computed by."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.errors import UnsupportedLossError
from kronfac.network.nested import refs_of
from kronfac.network.program import LossCall, ModelCall, Operation, Pass
from kronfac.objective import Objective

Step = ModelCall | Operation


@dataclass
class SeenLoss:
    """A loss call, and what arrives at it."""

    call: LossCall
    loss: Tensor | None
    arrived: Tensor | None = None

    def arrive(self, gradient: Tensor) -> None:
        """Add what a backward pass brings; a hook of the loss."""
        self.arrived = gradient if self.arrived is None else self.arrived + gradient

    def with_factor(self) -> LossCall | None:
        """The call with what it counts in the objective; None if nothing arrived at it."""
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


def group(steps: Sequence[Step], losses: Sequence[LossCall]) -> tuple[Pass, ...]:
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


def declare(
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
