"""The trials of one network: which there are, which are to come, and how some of them run in turns.

The runs of a seed, or those that try the n-th rate of everyone, take turns of some seconds, so that a slow
moment of the machine hits all of them.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kronfac_experiments.bench.race.config import TUNING_SEED, RaceConfig
from kronfac_experiments.bench.race.networks.problems import NetworkProblem
from kronfac_experiments.bench.race.networks.racers import Racer, racers_named
from kronfac_experiments.bench.race.networks.run import MARKS, TUNING_MARKS, Evaluator, Run
from kronfac_experiments.bench.race.networks.trials import NetworkTrial, Phase
from kronfac_experiments.machine import versions
from kronfac_experiments.trial_store import TrialStore

SLICE = 2.0
"""Seconds of a turn."""


@dataclass(frozen=True)
class Entry:
    """What one run is to be."""

    racer: Racer
    lr: float | None
    seed: int


class NetworkRace:
    """The trials of a problem, those of an earlier command included.

    Args:
        config: What to run.
        problem: On what.

    Raises:
        RunError: the store is damaged, or of other settings.
    """

    def __init__(self, config: RaceConfig, problem: NetworkProblem) -> None:
        self.config, self.problem = config, problem
        self.racers = racers_named(config.optimizers)
        self.store: TrialStore[Any, NetworkTrial] = TrialStore(
            config.folder / f"{problem.name}.json",
            self._settings,
            NetworkTrial,
            key=lambda trial: trial.key,
        )

    @property
    def _settings(self) -> dict[str, Any]:
        """What a trial depends on; more optimizers and seeds may be asked for later."""
        sizes = self.config.sizes
        return {
            "kronfac": versions()["kronfac"],
            "threads": self.config.threads,
            "clock": self.config.clock,
            "seconds": sizes.seconds,
            "tune_seconds": sizes.tune_seconds,
            "about": self.problem.about,
            "evaluated": list(self.evaluated),
            "batch": self._first_order_batch,
            "kfac_batch": self._kfac_batch,
        }

    @property
    def evaluated(self) -> tuple[int, int]:
        """Examples of training and of validation that are evaluated."""
        asked = self.config.evaluation_cases
        return self.problem.evaluated if asked is None else (asked, asked)

    @property
    def _first_order_batch(self) -> int:
        return self.config.batch or self.problem.batch

    @property
    def _kfac_batch(self) -> int:
        return self.config.kfac_batch or self.problem.kfac_batch

    def batch_of(self, racer: Racer) -> int:
        """Examples in a mini-batch."""
        return self._kfac_batch if racer.is_kfac else self._first_order_batch

    def rates(self, racer: Racer) -> tuple[float, ...]:
        """What is tried here; none for K-FAC."""
        return racer.rates_for(self.problem.loss_scale)

    def found(self, phase: Phase, racer: Racer) -> list[NetworkTrial]:
        """Trials of a racer, in the order of its rates or of the seeds."""
        own = [t for t in self.store.values() if (t.phase, t.optimizer) == (phase, racer.name)]
        if phase == "race":
            seeds = range(self.config.sizes.seeds)
            return sorted((t for t in own if t.seed in seeds), key=lambda t: t.seed)
        return sorted((t for t in own if t.lr in self.rates(racer)), key=lambda t: t.lr or 0.0)

    def rate(self, racer: Racer) -> float | None:
        """The rate with the lowest validation loss while tuning; None for K-FAC, or if all failed."""
        tried = [t for t in self.found("tune", racer) if not t.message]
        return min(tried, key=lambda t: t.best("validation loss")).lr if tried else None

    def groups(self, phase: Phase) -> Iterator[list[Entry]]:
        """Runs that take turns, without those that were made before."""
        planned: Iterator[list[Entry]]
        if phase == "tune":
            turns = itertools.zip_longest(*(self.rates(racer) for racer in self._tuned))
            planned = (
                [
                    Entry(racer, lr, TUNING_SEED)
                    for racer, lr in zip(self._tuned, turn, strict=True)
                    if lr is not None
                ]
                for turn in turns
            )
        else:
            planned = (
                [
                    Entry(racer, lr, seed)
                    for racer in self.racers
                    if (lr := self.rate(racer)) is not None or racer.is_kfac
                ]
                for seed in range(self.config.sizes.seeds)
            )
        for group in planned:
            left = [entry for entry in group if not self._is_done(phase, entry)]
            if left:
                yield left

    @property
    def _tuned(self) -> list[Racer]:
        return [racer for racer in self.racers if racer.rates]

    def _is_done(self, phase: Phase, entry: Entry) -> bool:
        return any(t.seed == entry.seed and (phase == "race" or t.lr == entry.lr)
                   for t in self.found(phase, entry.racer))  # fmt: skip

    @property
    def seconds_left(self) -> float:
        """Optimizers' seconds of what has not run."""
        tuning, racing = self._runs_left
        return tuning * self.config.sizes.tune_seconds + racing * self.config.sizes.seconds

    @property
    def evaluations_left(self) -> int:
        """Evaluations of what has not run."""
        tuning, racing = self._runs_left
        return tuning * len(TUNING_MARKS) + racing * len(MARKS)

    @property
    def _runs_left(self) -> tuple[int, int]:
        """Runs of tuning and of the race."""
        tuning = sum(len(racer.rates) - len(self.found("tune", racer)) for racer in self._tuned)
        racing = sum(self.config.sizes.seeds - len(self.found("race", r)) for r in self.racers)
        return tuning, racing

    def run(self, phase: Phase, group: Sequence[Entry], tick: Callable[[float], None]) -> None:
        """Run a group, and keep its trials when all have ended."""
        limit = self.config.sizes.tune_seconds if phase == "tune" else self.config.sizes.seconds
        evaluator = Evaluator(self.problem, self.evaluated)
        runs = [
            Run(
                self.problem,
                entry.racer,
                entry.lr,
                entry.seed,
                limit,
                self.batch_of(entry.racer),
                evaluator,
                TUNING_MARKS if phase == "tune" else MARKS,
                time.process_time if self.config.clock == "processor" else time.perf_counter,
            )
            for entry in group
        ]
        turn = 0
        while not all(run.ended for run in runs):
            turn += 1
            # Who begins changes from turn to turn.
            for run in runs if turn % 2 else reversed(runs):
                if run.ended:
                    continue
                spent = run.advance(turn * SLICE)
                tick(max(spent, limit - run.seconds + spent) if run.ended else spent)
        self.store.keep(
            *(
                NetworkTrial(
                    self.problem.name, entry.racer.name, phase, entry.lr, entry.seed, limit,
                    self.batch_of(entry.racer), run.rows, run.message,
                )
                for entry, run in zip(group, runs, strict=True)
            )
        )  # fmt: skip
