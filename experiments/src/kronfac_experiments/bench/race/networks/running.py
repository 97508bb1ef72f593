"""Runs what has not run yet: for each problem first the rates, then the seeds.

Every problem has a store of its own: processes can race on different problems in one folder.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import nn

from kronfac import KFAC
from kronfac_experiments.bench.race.config import RaceConfig
from kronfac_experiments.bench.race.networks.network_race import NetworkRace
from kronfac_experiments.bench.race.networks.problems import NetworkProblem, networks_named
from kronfac_experiments.bench.race.networks.racers import Racer, racers_named
from kronfac_experiments.bench.race.networks.run import WARM_UP_EXAMPLES, Evaluator
from kronfac_experiments.bench.race.networks.trials import NetworkTrial
from kronfac_experiments.file_lock import try_lock
from kronfac_experiments.progress import clock, number
from kronfac_experiments.run_directory import RunError

EVALUATED = 2
"""Times that the training examples are evaluated: current and averaged parameters."""


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


def _run_problem(race: NetworkRace, console: Console, progress: Progress, bar: TaskID) -> None:
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
    evaluating = sum(race.evaluations_left * evaluation_seconds(race) for race in races)
    return (
        f"{len(races)} problem(s) × ({tuned} rates × {sizes.tune_seconds:g} s + {len(racers)} "
        f"optimizers × {sizes.seeds} seed(s) × {sizes.seconds:g} s), of which {clock(left)} (h:mm:ss) of "
        f"optimiser time are left, and about {clock(evaluating)} of evaluation: {clock(left + evaluating)}."
    )


def evaluation_seconds(race: NetworkRace) -> float:
    """How long one evaluation takes here; 0 if there is none to come."""
    if not race.evaluations_left:
        return 0.0
    evaluator, model = Evaluator(race.problem, race.evaluated), race.problem.make_model(0)
    evaluator.on(model, evaluator.validation.first(WARM_UP_EXAMPLES))  # the first is slower
    began = time.perf_counter()
    for cases in (*[evaluator.train] * EVALUATED, evaluator.validation):
        evaluator.on(model, cases)
    return time.perf_counter() - began


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
