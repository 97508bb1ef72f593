"""The candidates for γ at a refresh of the inverse, each carried through to a step [MG15 §6.6].

Pure; a refresh that starts in the background is begun by the optimizer when the step is committed.
"""

import math
from dataclasses import dataclass, replace

from kronfac.control import Measurement
from kronfac.curvature import DampedInverse
from kronfac.errors import MemoryExhaustedError
from kronfac.model import Matrices
from kronfac.report import Event, EventKind
from kronfac.settings import Settings
from kronfac.step.evaluation import Point
from kronfac.step.proposal import Proposal, Proposer
from kronfac.step.refresh import Computed, ComputedByRanks, Outcomes, Refresh
from kronfac.step.repair import plain_inverse, repair
from kronfac.step.state import CurrentInverse, State


@dataclass(frozen=True)
class Chosen:
    """The best proposal, and what became of the inverse."""

    proposal: Proposal
    candidates: tuple[float, ...]
    """The γ's that it was the best of; empty if the inverse was not refreshed."""
    current: CurrentInverse
    refresh: Refresh | None
    measurement: Measurement
    """With a summary of the factors, if a refresh started in this step."""


def best_proposal(
    settings: Settings, proposer: Proposer, before: State, events: list[Event]
) -> Chosen:
    """The proposal with the lowest M(δ), or h(θ + δ), among the candidates for γ [§6.6]."""
    point, watch, stale = proposer.point, proposer.watch, before.current
    assert before.gamma is not None
    refresh, m = _refresh(settings, proposer, before)
    if stale is not None and (refresh is None or refresh.adoption > m.iteration):
        proposal = proposer.propose(before.gamma.gamma, stale.inverse, stale.decayed)
        return Chosen(proposal, (), stale, refresh, m)
    assert refresh is not None
    best: Proposal | None = None
    failure: Exception | None = None
    with watch("inverse"):
        outcomes = iter(refresh.outcomes)  # waits for those from the background
    for gamma in refresh.candidates:
        with watch("inverse"):
            outcome = next(outcomes)
        if isinstance(outcome, Exception):
            failure = outcome
            memory = isinstance(failure, MemoryExhaustedError)
            kind = EventKind.OUT_OF_MEMORY if memory else EventKind.CANDIDATE_FAILED
            events.append(Event(kind, f"γ = {gamma:.4g}: {failure}"))
            continue
        with watch("inverse"):
            outcome, repaired = _repair(settings, proposer, stale, gamma, outcome)
            events += repaired
        with watch("inverse"):
            decayed = _decay_part(settings, outcome, point)
        proposal = proposer.propose(gamma, outcome, decayed)
        several = len(refresh.candidates) > 1
        if several and settings.gamma.criterion == "objective":
            proposal = _with_change(proposer, proposal)
        best = proposal if best is None or _value(proposal) < _value(best) else best
        # Nothing is left of the loser when the next one is made.
        del outcome, decayed, proposal
    if best is not None:
        current = CurrentInverse(best.inverse, refresh.iteration, refresh.lambda_, best.decayed)
        return Chosen(best, refresh.candidates, current, None, m)
    assert failure is not None
    point.check_finite(proposer.curvature)
    if stale is None:
        gamma = before.gamma.gamma
        inverse = plain_inverse(proposer.curvature, gamma, point.gradient)
        events.append(
            Event(EventKind.BLOCK_PLAIN, f"The plain gradient is used for all units: {failure}")
        )
        current = CurrentInverse(inverse, refresh.iteration, refresh.lambda_, None)
        return Chosen(proposer.propose(gamma, inverse), (), current, None, m)
    events.append(Event(EventKind.REFRESH_FAILED, f"The inverse stays as it was: {failure}"))
    proposal = proposer.propose(before.gamma.gamma, stale.inverse, stale.decayed)
    return Chosen(proposal, (), stale, None, m)


def _refresh(
    settings: Settings, proposer: Proposer, before: State
) -> tuple[Refresh | None, Measurement]:
    """The refresh that is under way, or one that starts at this iteration, or none."""
    m, current, under_way = proposer.measurement, before.current, before.refresh
    assert before.gamma is not None
    if under_way is not None:  # its inverse is not in use yet, but soon will be
        m = replace(m, inverse_lambda=under_way.lambda_)
    drifted = m.inverse_lambda is not None and settings.gamma.due(before.gamma, m)
    if under_way is not None and not drifted:
        return under_way, m
    last = 0 if current is None else current.iteration
    if not (current is None or drifted or settings.intervals.refreshes(m.iteration, last)):
        return None, m
    m = replace(
        m,
        drifted=drifted,
        sampling_error=proposer.curvature.sampling_error(),
        mean_curvature=proposer.curvature.mean(),
    )
    candidates = settings.gamma.candidates(before.gamma, m)
    # γ has to follow at once if λ has moved far; and without an inverse there is no step.
    lag = 0 if drifted or current is None else settings.intervals.lag(m.iteration)
    made = (settings.inverse, proposer.curvature, candidates)
    world = proposer.point.evaluation.world
    outcomes: Outcomes = Computed(*made) if world.size == 1 else ComputedByRanks(*made, world)
    return Refresh(m.iteration, m.iteration + lag, m.lambda_, candidates, outcomes), m


def _repair(
    settings: Settings,
    proposer: Proposer,
    stale: CurrentInverse | None,
    gamma: float,
    damped: DampedInverse,
) -> tuple[DampedInverse, list[Event]]:
    """The inverse with something usable for every unit: one block's failure is its own."""
    return repair(
        damped,
        settings.inverse,
        proposer.curvature,
        gamma,
        None if stale is None else stale.inverse,
        proposer.network.units,
        proposer.point.gradient,
    )


def _decay_part(settings: Settings, inverse: DampedInverse, point: Point) -> Matrices | None:
    """η F̆⁻¹θ, kept apart for the low-rank route, also if the gradient has come by another one [§8]."""
    evaluation = point.evaluation
    network, decay = evaluation.network, evaluation.weight_decay
    shapes = [unit.shape for unit in network.units]
    if not decay or not settings.inverse.wants_factors(shapes, evaluation.examples, decay.largest):
        return None
    if decay.uniform:
        return tuple(U * decay.usual for U in inverse.mv(network.theta()))
    return inverse.mv(network.join(decay.times(network.parameters, network.parameters)))


def _with_change(proposer: Proposer, proposal: Proposal) -> Proposal:
    """The proposal with h(θ + δ) − h(θ); NaN is never the lowest."""
    with proposer.watch("reduction_ratio"):
        change = proposer.point.evaluation.change(proposal.delta)
    return replace(proposal, change=math.inf if math.isnan(change) else change)


def _value(proposal: Proposal) -> float:
    """What the best proposal has lowest."""
    return proposal.step.predicted_change if proposal.change is None else proposal.change
