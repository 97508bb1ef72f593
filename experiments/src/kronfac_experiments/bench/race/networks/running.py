"""Runs what has not run yet: for each problem first the rates, then the seeds.

A store a problem: processes can race on different problems in one folder. The runs of a seed, or those
that try the n-th rate of everyone, take turns of some seconds, so that a slow moment of the machine
hits all of them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from kronfac import KFAC
from kronfac_experiments.bench.race.config import TUNING_SEED, RaceConfig
from kronfac_experiments.bench.race.networks.problems import NetworkProblem, networks_named
from kronfac_experiments.bench.race.networks.racers import Racer, racers_named
from kronfac_experiments.bench.race.networks.run import MARKS, TUNING_MARKS, Evaluator, Run
from kronfac_experiments.bench.race.networks.trials import NetworkTrial, Phase
from kronfac_experiments.file_lock import try_lock
from kronfac_experiments.machine import versions
from kronfac_experiments.progress import clock, number
from kronfac_experiments.run_directory import RunError
from kronfac_experiments.trial_store import TrialStore

SLICE = 2.0
"""Seconds of a turn."""
OVERHEAD = 0.25
"""Evaluations, averages and mini-batches, as a share of the optimizers' seconds: a rough measurement."""


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

    def found(self, phase: Phase, racer: Racer) -> list[NetworkTrial]:
        """Trials of a racer, in the order of its rates or of the seeds."""
        own = [t for t in self.store.values() if (t.phase, t.optimizer) == (phase, racer.name)]
        if phase == "race":
            seeds = range(self.config.sizes.seeds)
            return sorted((t for t in own if t.seed in seeds), key=lambda t: t.seed)
        return sorted((t for t in own if t.lr in racer.rates), key=lambda t: t.lr or 0.0)

    def rate(self, racer: Racer) -> float | None:
        """The rate with the lowest validation loss while tuning; None for K-FAC, or if all failed."""
        tried = [t for t in self.found("tune", racer) if not t.message]
        return min(tried, key=lambda t: t.best("validation loss")).lr if tried else None

    def groups(self, phase: Phase) -> Iterator[list[Entry]]:
        """Runs that take turns, without those that were made before."""
        planned: Iterator[list[Entry]]
        if phase == "tune":
            turns = itertools.zip_longest(*(racer.rates for racer in self._tuned))
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
        sizes = self.config.sizes
        tuning = sum(len(racer.rates) - len(self.found("tune", racer)) for racer in self._tuned)
        racing = sum(sizes.seeds - len(self.found("race", racer)) for racer in self.racers)
        return tuning * sizes.tune_seconds + racing * sizes.seconds

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


def run_networks(config: RaceConfig, console: Console) -> list[NetworkRace]:
    """All of it, what an earlier command left included.

    Raises:
        RunError: another process races on one of the problems.
        TrainingInterruptedError: Ctrl-C; what has run is kept.
    """
    torch.set_num_threads(config.threads)
    _refuse_unknown_options(racers_named(config.optimizers))
    names = networks_named(config.problems)
    with _locked(config.folder, names):
        races = [NetworkRace(config, problem) for problem in names]
        console.print(budget(races))
        columns = (
            TextColumn("{task.description:<32.32}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} %"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=sum(race.seconds_left for race in races))
            for race in races:
                _run_problem(race, console, progress, bar)
    return races


def _run_problem(race: NetworkRace, console: Console, progress: Progress, bar: Any) -> None:
    for phase in ("tune", "race"):
        for group in race.groups(phase):
            seed = group[0].seed
            progress.update(bar, description=f"{race.problem.name}, {phase}, seed {seed}")
            with race.store.interruptible():
                race.run(phase, group, lambda seconds: progress.advance(bar, seconds))
            for entry in group:
                found = race.found(phase, entry.racer)
                console.print(_told(next(t for t in found if (t.lr, t.seed) == (entry.lr, seed))))


def budget(races: Sequence[NetworkRace]) -> str:
    """How long what is left takes, in words."""
    left = sum(race.seconds_left for race in races)
    if not left:
        return "All of these runs are there already."
    sizes, racers = races[0].config.sizes, races[0].racers
    tuned = sum(len(racer.rates) for racer in racers)
    return (
        f"{len(races)} problem(s) × ({tuned} rates × {sizes.tune_seconds:g} s + {len(racers)} "
        f"optimizers × {sizes.seeds} seed(s) × {sizes.seconds:g} s), of which {clock(left)} (h:mm:ss) of "
        f"optimizers' time are left; with evaluations about {clock((1 + OVERHEAD) * left)}."
    )


def _told(trial: NetworkTrial) -> str:
    rate = "" if trial.lr is None else f", lr {trial.lr:g}"
    who = f"{trial.problem}, {trial.phase}: {trial.optimizer}{rate}, seed {trial.seed}"
    if trial.message:
        return f"{who}: {trial.message}"
    training, validation, metric = trial.rows[-1][3:]
    return (
        f"{who}: training loss {number(training)}, validation {number(validation)} and "
        f"{number(metric)} after {trial.steps} steps"
    )


def _refuse_unknown_options(racers: Sequence[Racer]) -> None:
    """Before hours of others' runs: does this version of K-FAC have these arguments?"""
    for racer in (racer for racer in racers if racer.is_kfac):
        try:
            KFAC(nn.Linear(1, 1), nn.MSELoss(), **racer.options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{racer.name} can't race with this kronfac: {error}") from error


@contextmanager
def _locked(folder: Path, problems: Sequence[NetworkProblem]) -> Iterator[None]:
    folder.mkdir(parents=True, exist_ok=True)
    streams = []
    try:
        for problem in problems:
            streams.append((folder / f".{problem.name}.lock").open("wb"))
            if not try_lock(streams[-1]):
                raise RunError(
                    f"Another process races on {problem.name} in {folder}. Name other --problems, or "
                    "another folder with --run-dir."
                )
        yield
    finally:
        for stream in streams:
            stream.close()
