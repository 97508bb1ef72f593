"""The last step, validated on the mini-batch of this one [MG15 §6.5], before a new one is computed.

Pure; θ is rolled back by `take.py` if the step is rejected.
"""

import math
from dataclasses import dataclass, replace

from kronfac.control import Kept, LongMemory, Losses, Measurement, Pending, StepState
from kronfac.report import REJECTED_BY, Event, EventKind
from kronfac.settings import Settings
from kronfac.step.evaluation import Evaluation
from kronfac.step.proposal import Proposal
from kronfac.step.state import State


@dataclass(frozen=True)
class Validation:
    """What the mini-batch says of the last step."""

    state: State
    """With λ moved, and nothing left to validate, if the step was validated; if rejected, as before it."""
    rho: float | None = None
    """See `Verdict`."""
    rejected: Pending | None = None
    """The step to be rolled back."""
    events: tuple[Event, ...] = ()
    """The rejection."""
    outlier: bool = False
    """Whether the mini-batch itself is an outlier, so that a step from it has to be validated too."""


def validate(settings: Settings, evaluation: Evaluation, state: State) -> Validation:
    """The last step by h(θ) and h(θ − δ) on this mini-batch, if it is its turn or the loss calls for it."""
    pending, acceptance = state.acceptance.pending, settings.acceptance
    if pending is None:
        return Validation(state)
    m, numbers = state.measure(evaluation), evaluation.numbers
    found = replace(m, loss=numbers.returned)
    in_turn = pending.validate or settings.damping.measures(m.iteration) == "next"
    if not in_turn and not acceptance.suspects(state.acceptance, found, numbers.penalty):
        return Validation(state)
    unvalidated = Validation(state, outlier=acceptance.suspects(state.acceptance, found))
    if pending.predicted_change == 0:
        return unvalidated
    back = tuple(V.neg() for V in pending.delta)
    losses = Losses(
        after=numbers.loss,
        before=float(evaluation.loss_at(back)),
        penalty_change=-evaluation.decay_change(back),
    )
    verdict = acceptance.validate(state.acceptance, m, losses)
    if verdict is None:
        return unvalidated
    damping = settings.damping.update(state.damping, verdict.measurement)
    after = replace(state, acceptance=verdict.state, damping=damping)
    if verdict.cause is None:
        return Validation(after, verdict.rho, outlier=unvalidated.outlier)
    # What the step taught is kept: statistics and inverse, a larger λ.
    momentum = None if pending.kept is None else pending.kept.momentum
    after = replace(after, step=replace(state.step, momentum=momentum))
    message = f"The last step is rejected: {verdict.cause}"
    event = Event(EventKind.REJECTED, message, REJECTED_BY[verdict.reason])
    return Validation(after, verdict.rho, pending, (event,))


def pending(
    settings: Settings,
    evaluation: Evaluation,
    before: State,
    best: Proposal,
    m: Measurement,
    outlier: bool,
) -> Pending:
    """What the next mini-batch needs to validate this step, and to roll it back."""
    validate = outlier or (best.far and m.noise is not None)
    keep = validate or best.far or settings.damping.measures(m.iteration + 1) == "next"
    keep = keep and settings.acceptance.rejection is not None
    return Pending(
        delta=best.delta,
        examples=m.examples,
        loss=best.loss,
        penalty=best.penalty,
        predicted_change=best.step.predicted_change,
        curvature_share=best.curvature_share,
        kept=Kept(evaluation.network.theta(), before.step.momentum) if keep else None,
        validate=validate,
    )


def compare_average(
    memory: LongMemory, evaluation: Evaluation, state: StepState, m: Measurement
) -> StepState:
    """The momentum's memory after θ̄ was compared with θ on this mini-batch, if it is time to."""
    average = state.memory.average
    if average is None or not memory.compares(state.memory, m):
        return state
    loss = float(evaluation.loss)
    if not math.isfinite(loss):
        return state
    lag = tuple(a - b for a, b in zip(average, evaluation.network.theta(), strict=True))
    change = evaluation.change(lag)
    return replace(state, memory=memory.compare(state.memory, replace(m, loss=loss), change))
