"""One step, top to bottom, in the order of [MG15 §9]: measure → refresh → propose → model.

The last step has been validated before (`validation.py`). Pure: what a step finds comes back as a
`Transition`, for the optimizer to commit or to drop.
"""

import math
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from kronfac.candidates import Chosen, best_proposal
from kronfac.control import Kept, Measurement, Pending, StepState
from kronfac.curvature import Curvature, ema_decay
from kronfac.curvature.estimate import Sample, estimate, head_counts
from kronfac.distributed import Phase, Place, Ranks
from kronfac.errors import RankError
from kronfac.evaluation import Evaluation, Point, RefusedError
from kronfac.first_damping import first_lambda
from kronfac.geodesic_step import minimises_wholly, propose_wholly
from kronfac.groups import PerParameter
from kronfac.learning_rate import ONE, apply_rates
from kronfac.linearization import Linearizer, can_be_explicit
from kronfac.measure import measure
from kronfac.network import Batch, Matrices, Network, Pass, sizes, subsets
from kronfac.proposal import Proposal, Proposer
from kronfac.report import Event, EventKind, StepReport, Stopwatch
from kronfac.settings import Settings
from kronfac.state import CurrentInverse, State, initial_gamma

UNSEEN_RADIUS = 1.0
"""The largest Fisher norm of a step for each term, if no step can be validated: δᵀFδ/2 is about by how much
predictive distributions change (Kullback–Leibler), half a nat of the average term."""
SUBSET_SEEDS = 1_000_003
"""Iterations until the seeds of the subsets repeat those of another seed."""


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
        curvature, current, generator = update_curvature(settings, evaluation, some, before, m)
        before = replace(before, current=current)
    proposer = Proposer(
        point,
        some.fisher,
        curvature,
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
            inverse = proposer.by_unit(settings.inverse)
            lambda_, trials = first_lambda(proposer, inverse, settings.damping.search)
        damping = replace(before.damping, lambda_=lambda_)
        before = replace(
            before, damping=damping, gamma=initial_gamma(settings, damping, m.weight_decay)
        )
        m = measure(evaluation, before)
        proposer = replace(proposer, measurement=m)
    chosen = None
    if wholly:
        chosen, before = _minimise_wholly(settings, proposer, before)
    if chosen is None:
        proposer = replace(proposer, measurement=replace(m, lambda_=before.damping.lambda_))
        chosen = best_proposal(settings, proposer, before, events)
    with watch("step_size"):
        best = apply_rates(proposer, chosen.proposal, rates)
    if not best.loss_seen:
        events.append(
            Event(
                EventKind.LOSS_NOT_SEEN,
                "The closure's loss is not the loss module's value on the model's outputs; the "
                "curvature is that of the loss module, and ρ calls the closure again."
                if evaluation.reevaluate is not None
                else "The loop's loss was not seen; the curvature is that of the loss that KFAC was given, "
                "and no step is validated.",
            )
        )
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
    loss = best.loss if evaluation.comparable() else math.nan
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
            acceptance=replace(
                before.acceptance,
                # By a loss that is not known, no mini-batch can validate the step later on either.
                pending=_pending(evaluation.network, settings, before, best, m, outlier)
                if evaluation.comparable()
                else None,
            ),
            curvature=curvature,
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

    Without a loss that can be had elsewhere λ does not follow it, and nothing rejects a step that is far
    too long. Predictive distributions of classes have a scale of their own to limit it by.
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
        step = [1.0, r.loss, r.predicted_change or 0.0, r.alpha or 0.0]
    rows = world.gather(Phase.COMMIT, step)
    if any(row != step for row in rows):
        raise RankError(
            f"The ranks have computed different steps (taken, loss, predicted change, α): {rows}. No rank "
            "takes one. They have to have the same model, settings, torch and kind of processor."
        )


# -------------------------------------------------------------------------------------------- measure


@dataclass(frozen=True)
class CurvatureExamples:
    """The examples that the curvature of a step is taken on."""

    statistics: Batch
    """S₁."""
    fisher: Batch
    """S₂."""
    around: Linearizer
    """How passes over them are made."""
    place: Place | None = None
    """Where they stand among those of all ranks; None in one process."""


def curvature_examples(
    settings: Settings, evaluation: Evaluation, m: Measurement, wholly: bool = False
) -> CurvatureExamples:
    """S₁ ⊂ S₂: drawn anew in every step, or the first examples [§8].

    All examples if M is to be minimised over all directions.
    """
    batch, spread = evaluation.batch, evaluation.spread
    if wholly:
        S1, S2 = subsets(evaluation.network, batch, sizes(batch, 1.0, 1.0), None)
        return CurvatureExamples(S1, S2, Linearizer(evaluation.network, keeps=True))
    terms = batch.most_terms + spread.terms_elsewhere
    fractions = settings.shares(m.examples, terms, convolutional=evaluation.network.convolutional)
    if batch.random and not batch.traced:
        # Statistics and J v have to see the same masks, which depend on the examples of a pass.
        fractions = fractions[1], fractions[1]
    explicit = spread.explicit and can_be_explicit(evaluation.network, batch)
    if explicit and settings.statistics_fraction is None:
        # J v is then a by-product of the statistics, if they are of the same examples.
        fractions = fractions[1], fractions[1]
    generator = None
    if not settings.first_examples:
        # A generator of its own, so that the targets' stream stays as it is; no state to be saved.
        generator = torch.Generator().manual_seed(SUBSET_SEEDS * settings.fisher.seed + m.iteration)
    counts = sizes(batch, *fractions, spread=spread)
    S1, S2 = subsets(evaluation.network, batch, counts, generator, spread)
    around = Linearizer(evaluation.network, keeps=explicit and S1 is S2)
    return CurvatureExamples(S1, S2, around, find_place(spread.world, S1, S2))


def find_place(world: Ranks, S1: Batch, S2: Batch) -> Place | None:
    """Where this rank's examples stand among those of all ranks; None in one process."""
    if world.size == 1:
        return None
    heads = [0.0 if S1.weightless else float(n) for n in head_counts(S1.passes).values()]
    rows = world.gather(Phase.EXAMPLES, [float(S1.examples), float(S2.examples), *heads])
    if len({len(row) for row in rows}) > 1:
        raise RankError(
            "The ranks' closures call different losses: "
            f"{', '.join(str(len(row) - 2) for row in rows)} kinds of loss calls. Call the same "
            "losses on all ranks."
        )
    totals = [sum(column) for column in zip(*rows, strict=True)]
    before = [sum(column) for column in zip(*rows[: world.rank], strict=True)] or [0.0] * len(
        totals
    )
    pairs = zip(totals[2:], before[2:], strict=True)
    return Place(int(totals[0]), int(totals[1]), [(int(all_), int(own)) for all_, own in pairs])


def update_curvature(
    settings: Settings,
    evaluation: Evaluation,
    some: CurvatureExamples,
    before: State,
    m: Measurement,
) -> tuple[Curvature, CurrentInverse | None, Tensor]:
    """The moving averages with S₁ in them [§5], the inverse in use, and the generator's new state.

    Most inverses stay as they are until the next refresh.
    """
    network, S1, place = evaluation.network, some.statistics, some.place
    generator = torch.Generator(device=network.device)
    generator.set_state(before.generator)
    fisher, memory = settings.fisher, settings.step_size.long_memory
    remembered = 1.0 if memory is None else memory.statistics(m)
    decay = ema_decay(m.iteration, fisher.ema_decay, remembered)
    current = before.current
    update = None
    if current is not None:
        update = settings.inverse.between_refreshes(current.inverse, decay)
    curvature = estimate(
        Sample(
            S1.passes,
            lambda part: some.around.for_statistics(cast(Pass, part)),
            factor=m.examples / (S1.examples if place is None else place.statistics),
            nothing=network.unused,
            world=evaluation.spread.world,
            place=place,
            weightless=S1.weightless,
        ),
        [unit.block for unit in network.units],
        fisher,
        generator,
        links=network.links,
        old=before.curvature,
        decay=decay,
        update=update,
    )
    if current is not None and update is not None:
        current = replace(current, inverse=update.value())
    return curvature, current, generator.get_state()


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
