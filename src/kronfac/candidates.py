"""The candidates for γ at a refresh of the inverse, each carried through to a step [MG15 §6.6].

Pure; a refresh that starts in the background is begun by the optimizer when the step is committed.
"""

import math
from dataclasses import dataclass, replace

from kronfac.factors import sampling_error
from kronfac.inverses import DampedInverse
from kronfac.layers import Matrices
from kronfac.measure import mean_curvature
from kronfac.point import Network, Point, check_finite, objective_change
from kronfac.proposal import Proposal, Proposer
from kronfac.refresh import Computed, Refresh
from kronfac.report import Event, EventKind
from kronfac.settings import Settings
from kronfac.state import CurrentInverse, State


@dataclass(frozen=True)
class Chosen:
    """The best proposal, and what became of the inverse."""

    proposal: Proposal
    candidates: tuple[float, ...]
    """The γ's that it was the best of; empty if the inverse was not refreshed."""
    current: CurrentInverse
    refresh: Refresh | None


def best_proposal(
    settings: Settings, proposer: Proposer, before: State, events: list[Event]
) -> Chosen:
    """The proposal with the lowest M(δ), or h(θ + δ), among the candidates for γ [§6.6]."""
    point, watch, stale = proposer.point, proposer.watch, before.current
    assert before.gamma is not None
    refresh = _refresh(settings, proposer, before)
    if stale is not None and (refresh is None or refresh.adoption > proposer.measurement.iteration):
        proposal = proposer.propose(before.gamma.gamma, stale.inverse, stale.decayed)
        return Chosen(proposal, (), stale, refresh)
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
            events.append(Event(EventKind.CANDIDATE_FAILED, f"γ = {gamma:.4g}: {failure}"))
            continue
        with watch("inverse"):
            decayed = _decayed(outcome, proposer.network, point)
        proposal = proposer.propose(gamma, outcome, decayed)
        if len(refresh.candidates) > 1 and settings.gamma.criterion == "objective":
            proposal = _with_change(proposer, proposal)
        best = proposal if best is None or _value(proposal) < _value(best) else best
        # Nothing is left of the loser when the next one is made.
        del outcome, decayed, proposal
    if best is not None:
        current = CurrentInverse(best.inverse, refresh.iteration, refresh.lambda_, best.decayed)
        return Chosen(best, refresh.candidates, current, None)
    assert failure is not None
    check_finite(point, proposer.factors, proposer.network.layers)
    if stale is None:
        raise failure
    events.append(Event(EventKind.REFRESH_FAILED, f"The inverse stays as it was: {failure}"))
    proposal = proposer.propose(before.gamma.gamma, stale.inverse, stale.decayed)
    return Chosen(proposal, (), stale, None)


def _refresh(settings: Settings, proposer: Proposer, before: State) -> Refresh | None:
    """The refresh that is under way, or one that starts at this iteration, or none."""
    m, current, under_way = proposer.measurement, before.current, before.refresh
    assert before.gamma is not None
    if under_way is not None:  # its inverse is not in use yet, but soon will be
        m = replace(m, inverse_lambda=under_way.lambda_)
    drifted = m.inverse_lambda is not None and settings.gamma.due(before.gamma, m)
    if under_way is not None and not drifted:
        return under_way
    last = 0 if current is None else current.iteration
    if not (current is None or drifted or settings.refreshes(m.iteration, last)):
        return None
    m = replace(
        m,
        drifted=drifted,
        sampling_error=sampling_error(proposer.factors),
        mean_curvature=mean_curvature(proposer.factors),
    )
    candidates = settings.gamma.candidates(before.gamma, m)
    # γ has to follow at once if λ has moved far; and without an inverse there is no step.
    lag = 0 if drifted or current is None else settings.lag(m.iteration)
    outcomes = Computed(settings.inverse, proposer.factors, candidates)
    return Refresh(m.iteration, m.iteration + lag, m.lambda_, candidates, outcomes)


def _decayed(inverse: DampedInverse, network: Network, point: Point) -> Matrices | None:
    """η F̆⁻¹θ, kept apart for the low-rank route [§8]."""
    if point.rows is None or point.weight_decay == 0:
        return None
    return tuple(U * point.weight_decay for U in inverse.mv(network.theta()))


def _with_change(proposer: Proposer, proposal: Proposal) -> Proposal:
    """The proposal with h(θ + δ) − h(θ); NaN is never the lowest."""
    with proposer.watch("reduction_ratio"):
        change = objective_change(
            proposer.network, proposer.point, proposal.loss_seen, proposal.delta
        )
    return replace(proposal, change=math.inf if math.isnan(change) else change)


def _value(proposal: Proposal) -> float:
    """What the best proposal has lowest."""
    return proposal.step.predicted_change if proposal.change is None else proposal.change
