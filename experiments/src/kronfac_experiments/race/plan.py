"""Which runs a race needs, and which of them are missing.

Every contestant with a grid is tuned at the full budget on a seed that is in no race: first all points of
the grid, then, if that is wanted, the other sizes of mini-batches and its other constants at the best
point. Then it races on the seeds.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from kronfac_experiments.race.contestants import Contestant, Schedule, Settings
from kronfac_experiments.race.problem import Problem
from kronfac_experiments.race.records import (
    TRAINING,
    VALIDATION,
    Cost,
    Records,
    Run,
    code_of,
    cost_key,
    key,
)

TUNING_SEED = 100
"""What is best there is not chosen by where it will be judged."""


@dataclass(frozen=True)
class Terms:
    """What is the same for everyone.

    Args:
        budget: `{"seconds": …}` or `{"steps": …}`.
        seeds: How many.
        schedule: Of learning rates.
        weight_decays: Decoupled; several are tuned.
        tune_fully: Whether other mini-batches and other constants are tried at the best point.
        threads: CPU threads.
        any_code: Whether runs of other versions of the code count, the newest of them.
        first_seed: The first of the seeds.
        by_clock: Whether each run takes the steps that its own clock allows, not those of a measured cost.
    """

    budget: dict[str, float]
    seeds: int = 3
    schedule: Schedule = "cosine"
    weight_decays: tuple[float, ...] = (0.01,)
    tune_fully: bool = False
    threads: int = 1
    any_code: bool = False
    first_seed: int = 0
    by_clock: bool = False

    def code(self, contestant: Contestant) -> str | None:
        """The version whose runs count; None for any."""
        return None if self.any_code else code_of(contestant)


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
            self.problem.name, self.contestant.recorded_as, self.settings, self.seed, terms.budget,
            terms.schedule, terms.threads,
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
        if len(self._points) == 1:
            return []
        stages = [self._entries(self._points, TUNING_SEED)]
        if self.terms.tune_fully and self.contestant.sampler is None:
            best = self._best(stages[0])
            others: list[Settings] = [{}]
            others += [self.contestant.alternative] if self.contestant.alternative else []
            tried = (
                [
                    best | other | {"batch": size}
                    for size in self.problem.batches
                    for other in others
                ]
                if best is not None
                else []
            )
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
        first, count = self.terms.first_seed, self.terms.seeds
        seeds = range(first, first + count)
        return [entry for seed in seeds for entry in self._entries([settings], seed)]

    @property
    def missing(self) -> list[Entry]:
        """Runs of the first stage that is not complete."""
        for stage in (*self.tuning, self.entries):
            left = [entry for entry in stage if self.run_of(entry) is None]
            if left:
                return left
        return []

    @property
    def runs(self) -> list[Run]:
        """The runs that count, as far as they have been made.

        Where tuning is not in the file, those at the settings that most seeds have raced with.
        """
        if self.settings is not None:
            return [run for e in self.entries if (run := self.run_of(e)) is not None]
        if any(self.run_of(entry) for stage in self.tuning for entry in stage):
            return []  # it is being tuned
        found: dict[str, list[Run]] = {}
        for run in self.records:
            if self._is_raced(run):
                found.setdefault(key(run.settings), []).append(run)
        return max(found.values(), key=len, default=[])

    def run_of(self, entry: Entry) -> Run | None:
        """Its run, if it has been made."""
        found = self.records.find(entry.key, self.terms.code(self.contestant))
        return found if isinstance(found, Run) else None

    def cost(self, batch: float | None) -> Cost | None:
        """What its steps cost at this size of the mini-batch, if that has been measured."""
        name = cost_key(self.problem.name, self.contestant.recorded_as, batch, self.terms.threads)
        found = self.records.find(name, self.terms.code(self.contestant))
        return found if isinstance(found, Cost) else None

    def _is_raced(self, run: Run) -> bool:
        terms = self.terms
        return (
            (run.problem, run.contestant) == (self.problem.name, self.contestant.recorded_as)
            and (run.budget, run.schedule, run.threads)
            == (terms.budget, terms.schedule, terms.threads)
            and terms.code(self.contestant) in (None, run.code)
            and run.seed < terms.seeds
        )

    @property
    def runs_left(self) -> int:
        """How many runs are needed still; the most it may be while tuning has not ended."""
        tuning, raced = self.tuning, len(self.runs)
        tried = [entry for stage in tuning for entry in stage]
        left = sum(self.run_of(entry) is None for entry in tried)
        if self.terms.tune_fully and tuning and not tuning[-1]:
            # One of them has run in the grid.
            left += len(self.problem.batches) * (2 if self.contestant.alternative else 1) - 1
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
        runs = [self.run_of(entry) for entry in stage]
        ended = [run for run in runs if run is not None]
        if not ended or len(ended) < len(stage):
            return None
        best = min(ended, key=lambda run: score(self.problem, run))
        return None if best.message else best.settings
