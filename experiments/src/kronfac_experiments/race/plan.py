"""Which runs a race needs, and which of them are missing.

Every contestant is tuned at the full budget on a seed that is in no race: first all points of its grid,
then, if that is wanted, the other sizes of mini-batches at the best point. Then it races on the seeds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from kronfac_experiments.race.contestants import Contestant, Schedule, Settings
from kronfac_experiments.race.problem import Problem
from kronfac_experiments.race.records import TRAINING, VALIDATION, Records, Run, code_of, key

TUNING_SEED = 100
"""What is best there is not chosen by where it will be judged."""


@dataclass(frozen=True)
class Terms:
    """What is the same for everyone.

    Args:
        budget: `{"seconds": …}` or `{"steps": …}`.
        seeds: How many, from 0.
        schedule: Of learning rates.
        weight_decays: Decoupled; several are tuned.
        tune_batch: Whether the other sizes of mini-batches are tried.
        threads: CPU threads.
        codes: Versions of the code by contestant, where they are not today's.
    """

    budget: dict[str, float]
    seeds: int = 3
    schedule: Schedule = "cosine"
    weight_decays: tuple[float, ...] = (0.01,)
    tune_batch: bool = False
    threads: int = 1
    codes: dict[str, str] = field(default_factory=dict)

    def code(self, contestant: Contestant) -> str:
        """The version whose runs count."""
        return self.codes.get(contestant.name) or code_of(contestant)


@dataclass(frozen=True)
class Entry:
    """A run that is needed."""

    problem: Problem
    contestant: Contestant
    settings: Settings
    seed: int
    terms: Terms

    @property
    def key(self) -> str:
        """That of its record."""
        terms = self.terms
        return key(
            self.problem.name, self.contestant.name, self.settings, self.seed, terms.budget,
            terms.schedule, terms.threads, terms.code(self.contestant),
        )  # fmt: skip


def score(problem: Problem, run: Run) -> float:
    """What decides on a problem, lower is better; ∞ for a run that failed."""
    if run.message:
        return math.inf
    return run.last(TRAINING) if problem.judged_by == "training" else run.lowest(VALIDATION)


class Lane:
    """A contestant on a problem: what it needs, what it has run and what it is best at.

    Args:
        problem: What is trained.
        contestant: Who trains.
        terms: Of the race.
        records: The runs so far.
    """

    def __init__(
        self, problem: Problem, contestant: Contestant, terms: Terms, records: Records
    ) -> None:
        self.problem, self.contestant, self.terms = problem, contestant, terms
        self.records = records
        self._points = contestant.points(problem, terms.weight_decays)

    @property
    def tuning(self) -> list[list[Entry]]:
        """Stages of tuning; the second one follows from the first, and is empty until that has run."""
        if not self.contestant.tuned and not self.terms.tune_batch:
            return []
        stages = [self._entries(self._points, TUNING_SEED)] if len(self._points) > 1 else []
        if self.terms.tune_batch and self.contestant.sampler is None:
            best = self._best(stages[0]) if stages else self._points[0]
            sizes = self.problem.batches
            tried = [] if best is None else [best | {"batch": size} for size in sizes]
            stages.append(self._entries(tried, TUNING_SEED))
        return stages

    @property
    def settings(self) -> Settings | None:
        """What it races with; None if that is not known yet, or if everything failed."""
        stages = self.tuning
        return self._best(stages[-1]) if stages else self._points[0]

    @property
    def entries(self) -> list[Entry]:
        """The runs that count; none until it is tuned."""
        settings = self.settings
        if settings is None:
            return []
        return [e for seed in range(self.terms.seeds) for e in self._entries([settings], seed)]

    @property
    def missing(self) -> list[Entry]:
        """Runs of the first stage that is not complete."""
        for stage in (*self.tuning, self.entries):
            left = [entry for entry in stage if self.records.get(entry.key) is None]
            if left:
                return left
        return []

    @property
    def runs(self) -> list[Run]:
        """The runs that count, as far as they have been made.

        Where tuning is not in the file, those at the settings that most seeds have raced with.
        """
        if self.settings is not None:
            return [run for e in self.entries if (run := self.records.get(e.key)) is not None]
        found: dict[str, list[Run]] = {}
        for run in self.records:
            if self._is_raced(run):
                found.setdefault(key(run.settings), []).append(run)
        return max(found.values(), key=len, default=[])

    def _is_raced(self, run: Run) -> bool:
        terms = self.terms
        return (run.problem, run.contestant, run.budget, run.schedule, run.threads, run.code) == (
            self.problem.name,
            self.contestant.name,
            terms.budget,
            terms.schedule,
            terms.threads,
            terms.code(self.contestant),
        ) and run.seed < terms.seeds

    @property
    def runs_left(self) -> int:
        """How many runs are needed still; the most it may be while tuning has not ended."""
        tuning, raced = self.tuning, len(self.runs)
        tried = [entry for stage in tuning for entry in stage]
        left = sum(self.records.get(entry.key) is None for entry in tried)
        if self.terms.tune_batch and tuning and not tuning[-1]:
            left += len(self.problem.batches)
        failed = not left and self.settings is None
        return 0 if failed else left + self.terms.seeds - raced

    @property
    def on_the_edge(self) -> bool:
        """Whether its rate is the least or most that was tried: a better one may lie beyond."""
        rates = [point["lr"] for point in self._points if point.get("lr") is not None]
        chosen = (self.settings or {}).get("lr")
        return len(set(rates)) > 2 and chosen in (min(rates), max(rates))  # type: ignore[type-var]

    def _entries(self, points: Iterable[Settings], seed: int) -> list[Entry]:
        return [Entry(self.problem, self.contestant, p, seed, self.terms) for p in points]

    def _best(self, stage: list[Entry]) -> Settings | None:
        """The settings with the best score; None until all have run, or if all failed."""
        runs = [self.records.get(entry.key) for entry in stage]
        ended = [run for run in runs if run is not None]
        if not ended or len(ended) < len(stage):
            return None
        best = min(ended, key=lambda run: score(self.problem, run))
        return None if best.message else best.settings
