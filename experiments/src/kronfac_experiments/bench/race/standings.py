"""Who got where: a line for each optimizer and target, medians and spread over the seeds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kronfac_experiments.bench.race.contests import Contest
from kronfac_experiments.bench.race.peers import KFAC, Peer, in_words, on_the_edge
from kronfac_experiments.bench.race.running import Race
from kronfac_experiments.bench.race.trials import Trial
from kronfac_experiments.error_curve import Axis
from kronfac_experiments.pages.document import spread
from kronfac_experiments.progress import number

HEADINGS = ("", "chosen", "error", "seconds", "iterations", "cases", "K-FAC faster by")
NOTHING = "–"


@dataclass(frozen=True)
class Line:
    """A line of the table, in words."""

    peer: Peer
    setting: str
    target: float
    seconds: str
    iterations: str = NOTHING
    cases: str = NOTHING
    faster: str = NOTHING

    @property
    def cells(self) -> tuple[str, ...]:
        """As `HEADINGS` has them."""
        return (
            self.peer.label,
            self.setting,
            number(self.target),
            self.seconds,
            self.iterations,
            self.cases,
            self.faster,
        )


def lines_of(race: Race, contest: Contest) -> list[Line]:
    """Every optimizer that was asked for, those that could not run too."""
    ours = race.found(contest, "race", KFAC)
    return [
        _line(race, contest, peer, target, ours)
        for peer in race.config.peers
        for target in contest.targets
    ]


def _line(race: Race, contest: Contest, peer: Peer, target: float, ours: Sequence[Trial]) -> Line:
    if peer.name in race.absent:
        return Line(peer, "", target, f"not installed: {race.absent[peer.name]}")
    point = race.best(contest, peer)
    if point is None:
        return Line(peer, "", target, "failed at every point of its grid")
    trials = [t for t in race.found(contest, "race", peer) if t.point == point]
    setting = in_words(point) + (" !" if on_the_edge(peer, point) else "")
    whole, grouped = ".0f", ",.0f"
    return Line(
        peer,
        setting,
        target,
        _seconds(trials, target),
        _spread(_reached(trials, "iteration", target), whole),
        _spread(_reached(trials, "cases", target), grouped),
        NOTHING if peer.name == KFAC.name else _faster(ours, trials, target),
    )


def _reached(trials: Sequence[Trial], axis: Axis, target: float) -> list[float | None]:
    return [trial.curve.reaches(axis, target) for trial in trials]


def _seconds(trials: Sequence[Trial], target: float) -> str:
    reached = _reached(trials, "seconds", target)
    if all(value is not None for value in reached):
        return _spread(reached, ".3g")
    limit = max(trial.limit for trial in trials)
    stood = statistics.median(trial.curve.lowest for trial in trials)
    those = [value for value in reached if value is not None]
    if those:
        return (
            f"{statistics.median(those):.3g} in {len(those)} of {len(trials)}, "
            f"else not in {limit:g} s"
        )
    failed = sum(bool(trial.message) for trial in trials)
    ended = f"; {failed} of {len(trials)} ended early" if failed else ""
    return f"not in {limit:g} s (stood at {number(stood)}{ended})"


def _spread(values: Sequence[float | None], form: str) -> str:
    """Median (least – most); nothing if a seed has none."""
    there = [value for value in values if value is not None]
    if not there or len(there) < len(values):
        return NOTHING
    return f"{there[0]:{form}}" if len(there) == 1 else spread(there, lambda v: f"{v:{form}}")


def _faster(ours: Sequence[Trial], theirs: Sequence[Trial], target: float) -> str:
    """Their seconds over ours, seed by seed, median; a bound if they did not get there.

    Where K-FAC did not, there is nothing to say but whether they did.
    """
    pairs = [(own, other) for own in ours for other in theirs if own.seed == other.seed]
    ratios, bound = [], False
    for own, other in pairs:
        seconds, others = (t.curve.reaches("seconds", target) for t in (own, other))
        if seconds is None or seconds <= 0:
            return "K-FAC did not get there" if others is not None else NOTHING
        bound |= others is None
        ratios.append((other.limit if others is None else others) / seconds)
    if not ratios:
        return NOTHING
    # With a run that ended early its limit stands for a time that never comes.
    return f"{'> ' if bound else ''}{statistics.median(ratios):.2g}"
