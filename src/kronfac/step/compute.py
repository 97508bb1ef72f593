"""One step, top to bottom, in the order of [MG15 §9]: measure → refresh → propose → model.

The last step has been validated before (`validation.py`). Pure: what a step finds comes back as a
`Transition`, for the optimizer to commit or to drop.
"""

import math
from dataclasses import dataclass, replace

from kronfac.control import Kept, Measurement, Pending, StepState
from kronfac.groups import PerParameter
from kronfac.model import Matrices, Network
from kronfac.report import Event, EventKind, StepReport, Stopwatch
from kronfac.settings import Settings
from kronfac.step.candidates import best_proposal
from kronfac.step.curvature_update import curvature_examples, update_curvature
from kronfac.step.evaluation import Evaluation, Point, RefusedError
from kronfac.step.first_damping import first_lambda
from kronfac.step.learning_rate import ONE, apply_rates
from kronfac.step.measure import measure
from kronfac.step.proposal import Proposal, Proposer
from kronfac.step.state import State, initial_gamma


@dataclass(frozen=True)
class Transition:
    """A step, computed and not yet taken."""

    delta: Matrices
    state: State
    report: StepReport


def compute_step(
    settings: Settings,
    point: Point,
    before: State,
    watch: Stopwatch,
    *,
    outlier: bool = False,
    rates: PerParameter = ONE,
) -> Transition:
    """The step from `point` and the state after it.

    From a mini-batch whose loss is an `outlier`, it is a step for the next one to validate. All is solved
    for a learning rate of 1; the step that is taken, and what is predicted for it, are by `rates`.

    Raises:
        RefusedError: loss, gradient, statistics or step are not finite.
    """
    events: list[Event] = []
    evaluation = point.evaluation
    m = measure(evaluation, before)
    with watch("reduction_ratio"):
        step_state = _compare_average(settings, evaluation, before.step, m)
    with watch("statistics"):
        some = curvature_examples(settings, evaluation, m)
        curvature, current, generator = update_curvature(settings, evaluation, some, before, m)
        before = replace(before, current=current)
    proposer = Proposer(
        point,
        some.fisher,
        curvature,
        settings.step_rule,
        step_state,
        m,
        watch,
        some.around,
        some.fisher_total,
    )
    trials = 0
    rule = settings.damping
    looks = rule.search is not None or rule.floored or math.isnan(m.lambda_)
    if m.iteration == 1 and looks:
        with watch("first_lambda"):
            before, trials = _find_first_lambda(settings, proposer, before)
        m = measure(evaluation, before)
        proposer = replace(proposer, measurement=m)
    chosen = best_proposal(settings, proposer, before, events)
    with watch("step_rule"):
        best = apply_rates(proposer, chosen.proposal, rates)
        if lost := evaluation.lost_to_clipping(best.delta, best.slope):
            step = replace(best.step, predicted_change=best.step.predicted_change + lost)
            best = replace(best, step=step, slope=best.slope + lost)
    if not evaluation.loss_seen:
        events.append(_LOSS_NOT_SEEN)
    predicted = best.step.predicted_change
    after = replace(
        chosen.measurement,
        loss=best.loss,
        gamma=best.gamma,
        candidates=chosen.candidates,
        predicted_change=predicted,
        curvature_share=best.curvature_share,
    )
    damping, rho = before.damping, None
    if settings.damping.measures(m.iteration) == "own" and predicted != 0:
        with watch("reduction_ratio"):
            change = best.change
            if change is None:
                change = evaluation.change(best.delta)
        rho = change / predicted
        # Without re-scaling M may predict a rise, for which ρ ≈ 1 says nothing good.
        after = replace(after, rho=math.nan if predicted > 0 else rho)
        damping = settings.damping.update(damping, after)
    assert before.gamma is not None
    alpha, *mu = best.step.coefficients
    memory = settings.step_rule.long_memory
    return Transition(
        delta=best.delta,
        state=State(
            iteration=m.iteration,
            generator=generator,
            damping=damping,
            gamma=settings.gamma.update(before.gamma, after),
            step=_update_average(
                settings, evaluation.network, replace(step_state, momentum=best.momentum), m
            ),
            acceptance=replace(
                before.acceptance,
                pending=_pending(evaluation.network, settings, before, best, m, outlier),
            ),
            curvature=curvature,
            current=chosen.current,
            refresh=chosen.refresh,
            gradients=before.gradients,
        ),
        report=StepReport(
            iteration=m.iteration,
            loss=best.loss,
            lambda_=damping.lambda_,
            gamma=best.gamma,
            alpha=alpha,
            mu=mu[0] if mu else None,
            rho=rho,
            predicted_change=predicted,
            examples=m.examples,
            mean_loss=best.loss / (m.examples if m.summed else 1),
            memory=1.0 if memory is None else memory.horizon(step_state.memory, m),
            trials=trials,
            seconds=watch.seconds,
            events=tuple(events),
        ),
    )


def agree(evaluation: Evaluation, outcome: Transition | RefusedError) -> None:
    """Let no rank take a step before all of them have the same one.

    Raises:
        RankError: they have not.
    """
    step = [0.0] * 4
    if isinstance(outcome, Transition):
        r = outcome.report
        step = [1.0, r.loss, r.predicted_change or 0.0, r.alpha or 0.0]
    what = "steps (taken, loss, predicted change, α)"
    evaluation.world.agree(step, "commit", what)


# -------------------------------------------------------------------------------------------- measure


def _find_first_lambda(settings: Settings, proposer: Proposer, before: State) -> tuple[State, int]:
    """The state with λ₀ and what γ makes of it, and the number of trial steps."""
    lambda_, trials = first_lambda(
        proposer,
        settings.inverse,
        settings.damping.search,
    )
    damping = replace(before.damping, lambda_=lambda_)
    gamma = initial_gamma(settings, damping, proposer.measurement.weight_decay)
    return replace(before, damping=damping, gamma=gamma), trials


def _compare_average(
    settings: Settings, evaluation: Evaluation, state: StepState, m: Measurement
) -> StepState:
    """The step rule's memory after θ̄ was compared with θ on this mini-batch, if it is time to."""
    memory = settings.step_rule.long_memory
    if memory is None:
        return state
    remembered = memory.begin(state.memory, m)
    if remembered.average is not None and memory.compares(remembered, m):
        m = replace(m, loss=float(evaluation.loss))
        pairs = zip(remembered.average, evaluation.network.theta(), strict=True)
        lag = tuple(a - b for a, b in pairs)
        if math.isfinite(m.loss or 0.0):
            change = evaluation.change(lag)
            remembered = memory.compare(remembered, m, change)
    return replace(state, memory=remembered)


def _update_average(
    settings: Settings, network: Network, state: StepState, m: Measurement
) -> StepState:
    """The step rule's memory with the θ that the step starts from in θ̄."""
    memory = settings.step_rule.long_memory
    if memory is None:
        return state
    theta = network.theta() if memory.averages(m) else None
    return replace(state, memory=memory.average(state.memory, m, theta))


# ---------------------------------------------------------------------------------------------- commit


_LOSS_NOT_SEEN = Event(
    EventKind.LOSS_NOT_SEEN,
    "The closure's loss is not the loss module's value on the model's outputs; the curvature is that of "
    "the loss module, and ρ calls the closure again.",
)


def _pending(
    network: Network,
    settings: Settings,
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
        kept=Kept(network.theta(), before.step.momentum) if keep else None,
        validate=validate,
    )
