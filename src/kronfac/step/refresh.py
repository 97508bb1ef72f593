"""A refresh of the inverse: candidates for γ, each carried to a step, and failed blocks [MG15 §6.6].

Pure; a refresh that starts in the background is begun by the optimizer when the step is committed. A block
without a usable inverse is repaired by itself: more damping, its last inverse, or the plain gradient.
float64 and jitter have been tried before (`linalg/spd.py`). An inverse is usable if all of its numbers are
finite: a decomposition may fail silently.
"""

import math
from dataclasses import dataclass, replace

import torch

from kronfac.control import Measurement
from kronfac.curvature import ApproximateInverse, Curvature, DampedInverse
from kronfac.curvature.diagonal import DiagonalOperator
from kronfac.curvature.inverse import Piece, usable, without_unusable
from kronfac.errors import MemoryExhaustedError, NonFiniteError, NotPositiveDefiniteError
from kronfac.model import Matrices
from kronfac.report import Event, EventKind
from kronfac.settings import AGE, FIRST_REFRESHES, LONGEST_INTERVAL, Intervals, Settings
from kronfac.step.inverses import Inverter
from kronfac.step.proposal import Proposal, Proposer
from kronfac.step.state import CurrentInverse, Refresh, State

MORE_DAMPING = (10.0, 100.0)
"""Factors of γ that are tried, one after the other, for a block that has no inverse."""


@dataclass(frozen=True)
class Chosen:
    """The best proposal, and the inverse after it."""

    proposal: Proposal
    candidates: tuple[float, ...]
    """The γ's that it was the best of; empty if the inverse was not refreshed."""
    current: CurrentInverse
    refresh: Refresh | None
    measurement: Measurement
    """With a summary of the factors, if a refresh started in this step."""
    events: tuple[Event, ...] = ()
    """What went wrong in the refresh."""


def best_proposal(settings: Settings, proposer: Proposer, before: State) -> Chosen:
    """The proposal with the lowest M(δ) among the candidates for γ [§6.6]."""
    evaluation, watch, stale = proposer.evaluation, proposer.watch, before.current
    assert before.gamma is not None
    refresh, m = _refresh(settings, proposer, before)
    if stale is not None and (refresh is None or refresh.adoption > m.iteration):
        proposal = proposer.propose(before.gamma.gamma, stale.inverse)
        return Chosen(proposal, (), stale, refresh, m)
    assert refresh is not None
    events: list[Event] = []
    best: Proposal | None = None
    failure: Exception | None = None
    assert refresh.inverter is not None
    for gamma in refresh.candidates:
        with watch("inverse"):
            outcome = refresh.inverter.damped(gamma)  # waits for one from the background
        if isinstance(outcome, Exception):
            failure = outcome
            memory = isinstance(failure, MemoryExhaustedError)
            kind = EventKind.OUT_OF_MEMORY if memory else EventKind.CANDIDATE_FAILED
            events.append(Event(kind, f"γ = {gamma:.4g}: {failure}"))
            continue
        with watch("inverse"):
            outcome, repaired = repair(settings, proposer, stale, gamma, outcome)
            events += repaired
        proposal = proposer.propose(gamma, outcome)
        if best is None or proposal.step.predicted_change < best.step.predicted_change:
            best = proposal
        # Nothing is left of the loser when the next one is made.
        del outcome, proposal
    if best is not None:
        current = CurrentInverse(best.inverse, refresh.iteration, refresh.lambda_)
        return Chosen(best, refresh.candidates, current, None, m, tuple(events))
    assert failure is not None
    evaluation.check_finite(proposer.curvature)
    if stale is None:
        gamma = before.gamma.gamma
        inverse = plain_inverse(proposer.curvature, gamma, evaluation.gradient)
        events.append(
            Event(EventKind.BLOCK_PLAIN, f"The plain gradient is used for all units: {failure}")
        )
        current = CurrentInverse(inverse, refresh.iteration, refresh.lambda_)
        return Chosen(proposer.propose(gamma, inverse), (), current, None, m, tuple(events))
    events.append(Event(EventKind.REFRESH_FAILED, f"The inverse stays as it was: {failure}"))
    proposal = proposer.propose(before.gamma.gamma, stale.inverse)
    return Chosen(proposal, (), stale, None, m, tuple(events))


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
    if not (current is None or drifted or refresh_due(settings.intervals, m.iteration, last)):
        return None, m
    m = replace(
        m,
        drifted=drifted,
        sampling_error=proposer.curvature.sampling_error(),
        mean_curvature=proposer.curvature.mean(),
    )
    candidates = settings.gamma.candidates(before.gamma, m)
    # γ has to follow at once if λ has moved far; and without an inverse there is no step.
    lag = 0 if drifted or current is None else _lag(settings.intervals, m.iteration)
    curvature = proposer.curvature
    inverter = Inverter(settings.inverse, curvature, proposer.evaluation.world)
    adoption = m.iteration + lag
    return Refresh(m.iteration, adoption, m.lambda_, candidates, curvature, inverter), m


def refresh_due(intervals: Intervals, iteration: int, last: int) -> bool:
    """Whether the inverse is refreshed at this iteration, the last refresh being at another."""
    if iteration <= FIRST_REFRESHES:
        return True
    if intervals.inverse_interval is not None:
        return iteration % intervals.inverse_interval == 0
    return iteration - last >= min(AGE * iteration, LONGEST_INTERVAL)


def _lag(intervals: Intervals, iteration: int) -> int:
    """Iterations from the start of a refresh at this iteration to its use."""
    if iteration <= FIRST_REFRESHES:
        return 0
    if intervals.inverse_interval is None and 2 * intervals.inverse_lag > AGE * iteration:
        return 0  # it would be out of date by then
    return intervals.inverse_lag


def repair(
    settings: Settings,
    proposer: Proposer,
    stale: CurrentInverse | None,
    gamma: float,
    damped: DampedInverse,
) -> tuple[DampedInverse, list[Event]]:
    """The inverse with every unusable block replaced, and an event for each kind of replacement."""
    units, curvature = proposer.network.units, proposer.curvature
    pieces = without_unusable(damped.pieces)
    if any(a is not b for a, b in zip(pieces, damped.pieces, strict=False)):
        damped = replace(damped, pieces=tuple(pieces))
    if not damped.failures:
        return damped, []
    events: dict[EventKind, list[str]] = {}
    replaced: dict[int, Piece] = {}
    for n, message in damped.failures:
        named = f"{units[n].name!r} ({message})"
        piece = _more_damped(settings.inverse, curvature, gamma, n)
        kind = EventKind.BLOCK_DAMPED
        if piece is None:
            piece, kind = (
                None if stale is None else stale.inverse.of_unit(n),
                EventKind.BLOCK_FAILED,
            )
        if piece is None or not usable(piece):
            piece, kind = (
                plain(curvature, gamma, n, proposer.evaluation.gradient),
                EventKind.BLOCK_PLAIN,
            )
        replaced[n] = piece
        events.setdefault(kind, []).append(named)
    said = {
        EventKind.BLOCK_DAMPED: "more damping is used for",
        EventKind.BLOCK_FAILED: "the last good inverse is kept of",
        EventKind.BLOCK_PLAIN: "the plain gradient is used for",
    }
    return damped.repaired(replaced), [
        Event(kind, f"γ = {gamma:.4g}: {said[kind]} {', '.join(names)}.")
        for kind, names in events.items()
    ]


def plain_inverse(curvature: Curvature, gamma: float, gradient: Matrices) -> DampedInverse:
    """The plain gradient for all blocks, if there is no memory for any inverse."""
    numbers = range(len(curvature.blocks))
    return DampedInverse(tuple(plain(curvature, gamma, n, gradient) for n in numbers))


def plain(curvature: Curvature, gamma: float, n: int, gradient: Matrices) -> DiagonalOperator:
    """I / (tr F / dim F + γ²): the gradient of one unit, as long as its mean curvature makes it."""
    block = curvature.blocks[n]
    mean = float(block.trace()) / block.size
    curved = (mean if 0 < mean < math.inf else 0.0) + gamma**2
    scale = 1 / curved if curved > 1 / torch.finfo(gradient[n].dtype).max else 1.0
    return DiagonalOperator(torch.full_like(gradient[n], scale))


def _more_damped(
    strategy: ApproximateInverse, curvature: Curvature, gamma: float, n: int
) -> Piece | None:
    alone = Curvature((curvature.blocks[n],), (), curvature.examples)
    for factor in MORE_DAMPING:
        try:
            (piece,) = strategy.prepare(alone).damped(factor * gamma).pieces
        except (NonFiniteError, NotPositiveDefiniteError):
            continue
        if usable(piece):
            return piece
    return None
