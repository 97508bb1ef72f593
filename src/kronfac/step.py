"""One step, top to bottom, in the order of [MG15 §9]: measure → refresh → propose → model.

The last step has been validated before (`validation.py`). Pure: what a step finds comes back as a
`Transition`, for the optimizer to commit or to drop.
"""

import math
from dataclasses import dataclass, replace

import torch

from kronfac.candidates import Chosen, best_proposal
from kronfac.clipped_gradient import predict_by_whole_gradient
from kronfac.control import Kept, Measurement, Pending, StepState, after_step
from kronfac.curvature_update import curvature_examples, update_curvature
from kronfac.distributed import Phase, Ranks
from kronfac.errors import RankError
from kronfac.evaluation import Evaluation, Point, RefusedError
from kronfac.first_damping import first_lambda
from kronfac.geodesic_step import minimises_wholly, propose_wholly
from kronfac.groups import PerParameter
from kronfac.learning_rate import ONE, apply_rates
from kronfac.measure import measure, slope_along
from kronfac.network import Matrices, Network
from kronfac.proposal import Proposal, Proposer
from kronfac.report import Event, EventKind, StepReport, Stopwatch
from kronfac.settings import Settings
from kronfac.state import State, initial_gamma

UNSEEN_RADIUS = 1.0
"""The largest Fisher norm of a step for each term, if no loss can be compared: δᵀFδ/2 is about by how much
predictive distributions change (Kullback–Leibler), half a nat of the average term."""


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
        wholly = minimises_wholly(settings, evaluation, m, rates)
        some = curvature_examples(settings, evaluation, m, wholly)
        later, current, generator = update_curvature(settings, evaluation, some, before, m)
        before = replace(before, current=current)
    proposer = Proposer(
        point,
        some.fisher,
        later,
        settings.step_size,
        step_state,
        m,
        watch,
        _radius(settings, evaluation),
        some.around,
        None if some.place is None else some.place.fisher,
    )
    trials = 0
    if m.iteration == 1 and (settings.damping.search is not None or math.isnan(m.lambda_)):
        with watch("first_lambda"):
            before, trials = _find_first_lambda(settings, proposer, before)
        m = measure(evaluation, before)
        proposer = replace(proposer, measurement=m)
    chosen = None
    if wholly:
        chosen, before = _minimise_wholly(settings, proposer, before)
    if chosen is None:
        proposer = replace(proposer, measurement=replace(m, lambda_=before.damping.lambda_))
        chosen = best_proposal(settings, proposer, before, events)
    with watch("step_size"):
        best = predict_by_whole_gradient(evaluation, apply_rates(proposer, chosen.proposal, rates))
    if not best.loss_seen:
        events.append(_loss_not_seen(evaluation))
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
    if best.tried and best.change is not None and predicted < 0:
        rho = best.change / predicted
    measures = settings.damping.measures(m.iteration) == "own" and evaluation.comparable()
    if measures and predicted != 0:
        with watch("reduction_ratio"):
            change = best.change
            if change is None:
                change = evaluation.change(best.delta, best.loss_seen)
        rho = change / predicted
        # Without re-scaling M may predict a rise, for which ρ ≈ 1 says nothing good.
        after = replace(after, rho=math.nan if predicted > 0 else rho)
        damping = settings.damping.update(damping, after)
    assert before.gamma is not None
    alpha, *mu = best.step.coefficients
    unseen = not evaluation.comparable()
    loss = math.nan if unseen else best.loss
    memory = settings.step_size.long_memory
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
            acceptance=after_step(
                before.acceptance,
                _pending(evaluation.network, settings, before, best, m, outlier or unseen),
                slope_along(point.gradient, best.delta, m) if unseen else None,
            ),
            curvature=later.value,
            current=chosen.current,
            refresh=chosen.refresh,
        ),
        report=StepReport(
            iteration=m.iteration,
            loss=loss,
            lambda_=damping.lambda_,
            gamma=best.gamma,
            alpha=alpha,
            mu=mu[0] if mu else None,
            rho=rho,
            predicted_change=predicted,
            examples=m.examples,
            mean_loss=loss / (m.examples if m.summed else 1),
            memory=1.0 if memory is None else memory.horizon(step_state.memory, m),
            trials=trials,
            seconds=watch.seconds,
            events=tuple(events),
        ),
    )


def _radius(settings: Settings, evaluation: Evaluation) -> float | None:
    """The largest Fisher norm of a step; None for any.

    Without a loss that can be had elsewhere a step that is far too long is seen by the next gradient alone.
    Predictive distributions of classes have a scale of their own to limit it by.
    """
    weight = 0.0
    if not evaluation.comparable():
        weight = evaluation.resolution / torch.finfo(evaluation.network.dtype).eps
    if not weight:
        return settings.clip
    radius = UNSEEN_RADIUS * math.sqrt(weight)
    return radius if settings.clip is None else min(radius, settings.clip)


def agree(world: Ranks, outcome: Transition | RefusedError) -> None:
    """Let no rank take a step before all of them have the same one.

    Raises:
        RankError: they have not.
    """
    if world.size == 1:
        return
    step = [0.0] * 4
    if isinstance(outcome, Transition):
        r = outcome.report
        # A loss that was not seen is NaN, which does not equal itself.
        loss = 0.0 if math.isnan(r.loss) else r.loss
        step = [1.0, loss, r.predicted_change or 0.0, r.alpha or 0.0]
    rows = world.gather(Phase.COMMIT, step)
    if any(row != step for row in rows):
        raise RankError(
            f"The ranks have computed different steps (taken, loss, predicted change, α): {rows}. No rank "
            "takes one. They have to have the same model, settings, torch and kind of processor."
        )


# -------------------------------------------------------------------------------------------- measure


def _find_first_lambda(settings: Settings, proposer: Proposer, before: State) -> tuple[State, int]:
    """The state with λ₀ and what γ makes of it, and the number of trial steps."""
    lambda_, trials = first_lambda(
        proposer,
        proposer.by_unit(settings.inverse),
        settings.damping.search,
        settings.inverse_share,
    )
    damping = replace(before.damping, lambda_=lambda_)
    gamma = initial_gamma(settings, damping, proposer.measurement.weight_decay)
    return replace(before, damping=damping, gamma=gamma), trials


def _minimise_wholly(
    settings: Settings, proposer: Proposer, before: State
) -> tuple[Chosen | None, State]:
    """A step of `geodesic_step.py`, if there is a good one, and the state with its λ."""
    rule, current = settings.step_size.geodesic_steps, before.current
    if rule is None or current is None:
        return None, before
    proposal, lambda_ = propose_wholly(proposer, rule, current)
    before = replace(before, damping=replace(before.damping, lambda_=lambda_))
    if proposal is None:
        return None, before
    m = proposer.measurement
    return Chosen(proposal, (), current, before.refresh, m), before


def _compare_average(
    settings: Settings, evaluation: Evaluation, state: StepState, m: Measurement
) -> StepState:
    """The step rule's memory after θ̄ was compared with θ on this mini-batch, if it is time to."""
    memory = settings.step_size.long_memory
    if memory is None or not evaluation.comparable():
        return state
    remembered = memory.begin(state.memory, m)
    if remembered.average is not None and memory.compares(remembered, m):
        m = replace(m, loss=float(evaluation.loss))
        pairs = zip(remembered.average, evaluation.network.theta(), strict=True)
        lag = tuple(a - b for a, b in pairs)
        if math.isfinite(m.loss or 0.0):
            change = evaluation.change(lag, evaluation.loss_seen())
            remembered = memory.compare(remembered, m, change)
    return replace(state, memory=remembered)


def _update_average(
    settings: Settings, network: Network, state: StepState, m: Measurement
) -> StepState:
    """The step rule's memory with the θ that the step starts from in θ̄."""
    memory = settings.step_size.long_memory
    if memory is None:
        return state
    theta = network.theta() if memory.averages(m) else None
    return replace(state, memory=memory.average(state.memory, m, theta))


# ---------------------------------------------------------------------------------------------- commit


def _loss_not_seen(evaluation: Evaluation) -> Event:
    """What follows for a step if the loss that is minimised is none that was recorded."""
    return Event(
        EventKind.LOSS_NOT_SEEN,
        "The closure's loss is not the loss module's value on the model's outputs; the "
        "curvature is that of the loss module, and ρ calls the closure again."
        if evaluation.reevaluate is not None
        else "The loop's loss was not seen; the curvature is that of the loss that KFAC was given, "
        "and steps are validated by gradients alone.",
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
    predicted, share = best.step.predicted_change, best.curvature_share
    if best.tried and best.change is not None:
        # What is left to be seen is whether the next mini-batch is another one; λ has been moved already.
        predicted, share = best.change, 1.0
    validate = outlier or (best.far and m.noise is not None)
    keep = validate or best.far or settings.damping.measures(m.iteration + 1) == "next"
    keep = keep and settings.acceptance.rejection is not None
    return Pending(
        delta=best.delta,
        examples=m.examples,
        loss=best.loss,
        penalty=best.penalty,
        predicted_change=predicted,
        curvature_share=share,
        kept=Kept(network.theta(), before.step.momentum) if keep else None,
        validate=validate,
    )
