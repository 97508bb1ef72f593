"""The last step, validated on the mini-batch of this one: a transition of its own, before the step.

Pure; the optimizer commits the result, and rolls θ back if the step is rejected.
"""

from dataclasses import dataclass, replace

from kronfac.control import Losses, Pending, SlopeState, Verdict, validate_slope
from kronfac.evaluation import Evaluation
from kronfac.measure import measure, slope_along
from kronfac.report import SAME_EXAMPLES, Event, EventKind
from kronfac.settings import Settings
from kronfac.state import State


@dataclass(frozen=True)
class Validation:
    """What became of the last step."""

    state: State
    """With λ moved, and nothing left to validate; if it was rejected, as before it."""
    rho: float
    """See `Verdict`."""
    rejected: Pending | None = None
    """The step to be rolled back."""
    event: Event | None = None


def in_turn(settings: Settings, state: State) -> bool:
    """Whether the next mini-batch validates the last step whatever its loss is."""
    pending = state.acceptance.pending
    if pending is None:
        return False
    in_turn = settings.damping.measures(state.iteration + 1) == "next"
    return in_turn or pending.validate or isinstance(state.acceptance, SlopeState)


def suspects(
    settings: Settings,
    evaluation: Evaluation,
    state: State,
    loss: float,
    penalty: float | None = None,
) -> bool:
    """Whether the loss of this mini-batch calls for a validation out of turn, see `Acceptance`."""
    if isinstance(state.acceptance, SlopeState):
        return False  # there is no loss to compare with
    m = replace(measure(evaluation, state), loss=loss)
    return settings.acceptance.suspects(state.acceptance, m, penalty)


def validate(settings: Settings, evaluation: Evaluation, state: State) -> Validation | None:
    """The last step by h(θ) and h(θ − δ) on this mini-batch, or by slopes; None if that can't tell."""
    pending = state.acceptance.pending
    if pending is None or pending.predicted_change == 0:
        return None
    if isinstance(state.acceptance, SlopeState):
        return _validate_slope(settings, evaluation, state, state.acceptance, pending)
    if not evaluation.comparable():
        return None
    back = tuple(V.neg() for V in pending.delta)
    loss_seen = evaluation.loss_seen()
    losses = Losses(
        after=float(evaluation.loss),
        before=float(evaluation.loss_at(back, loss_seen)),
        penalty_change=-evaluation.decay_change(back),
    )
    m = measure(evaluation, state)
    verdict = settings.acceptance.validate(state.acceptance, m, losses)
    return None if verdict is None else _validation(settings, state, pending, verdict)


def _validate_slope(
    settings: Settings, evaluation: Evaluation, state: State, by: SlopeState, pending: Pending
) -> Validation:
    """The last step, whose loss was not seen, by the gradients before and after it."""
    m = measure(evaluation, state)
    after = slope_along(evaluation.gradient(), pending.delta, m)
    verdict = validate_slope(settings.acceptance, settings.damping, by, m, after)
    if verdict.measurement.next_rho is None:  # λ stays as it is
        return Validation(replace(state, acceptance=verdict.state), verdict.rho)
    return _validation(settings, state, pending, verdict)


def _validation(settings: Settings, state: State, pending: Pending, verdict: Verdict) -> Validation:
    damping = settings.damping.update(state.damping, verdict.measurement)
    after = replace(state, acceptance=verdict.state, damping=damping)
    if verdict.cause is None:
        return Validation(after, verdict.rho)
    # What the step taught is kept: statistics and inverse, a larger λ.
    momentum = None if pending.kept is None else pending.kept.momentum
    after = replace(after, step=replace(state.step, momentum=momentum))
    message = f"The last step is rejected: {verdict.cause}"
    event = Event(EventKind.REJECTED, message, "" if verdict.differed else SAME_EXAMPLES)
    return Validation(after, verdict.rho, pending, event)
