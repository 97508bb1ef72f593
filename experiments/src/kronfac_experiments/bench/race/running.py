"""Runs what has not run yet: first every peer's grid, then the race, the field in turn for each seed."""

import itertools
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from kronfac_experiments.bench.race import kfac_jax_runs
from kronfac_experiments.bench.race.config import TUNING_SEED, RaceConfig
from kronfac_experiments.bench.race.contests import Contest, contests_named
from kronfac_experiments.bench.race.peers import KFAC_JAX, Peer, Point, in_words
from kronfac_experiments.bench.race.trials import Entry, Phase, Trial, marks, run_here
from kronfac_experiments.config import TrainConfig
from kronfac_experiments.machine import versions
from kronfac_experiments.progress import clock, number
from kronfac_experiments.task import Task, load_task
from kronfac_experiments.trial_store import TrialStore

RESULT = "race.json"
EVALUATED = 2
"""Current and averaged parameters."""


@dataclass
class Race:
    """The trials so far, and who can't take part."""

    config: RaceConfig
    trials: Collection[Trial]
    absent: dict[str, str] = field(default_factory=dict)
    """By name of the peer: why, and what would help."""

    @property
    def present(self) -> list[Peer]:
        """Those of the field that can run."""
        return [peer for peer in self.config.peers if peer.name not in self.absent]

    def found(self, contest: Contest, phase: Phase, peer: Peer) -> list[Trial]:
        """Trials of a peer, in the order of the grid or of the seeds."""
        wanted = (contest.problem, phase, peer.name)
        own = [t for t in self.trials if (t.problem, t.phase, t.optimizer) == wanted]
        if phase == "race":
            seeds = range(self.config.sizes.seeds)
            return sorted((t for t in own if t.seed in seeds), key=lambda t: t.seed)
        return sorted(
            (t for t in own if t.point in peer.grid), key=lambda t: peer.grid.index(t.point)
        )

    def best(self, contest: Contest, peer: Peer) -> Point | None:
        """The point to race with; None if every one failed."""
        if len(peer.grid) == 1:
            return peer.grid[0]
        tried = self.found(contest, "tune", peer)
        best = min(tried, key=lambda trial: trial.rank(contest.targets[-1]))
        return None if best.message else best.point

    def entries(self, contest: Contest, phase: Phase) -> Iterator[Entry]:
        """What a phase consists of; peers take turns, so that a slow hour hits all of them."""
        sizes = self.config.sizes
        if phase == "tune":
            tuned = [peer for peer in self.present if len(peer.grid) > 1]
            turns = itertools.zip_longest(*(peer.grid for peer in tuned))
            planned = (
                (peer, point, TUNING_SEED)
                for turn in turns
                for peer, point in zip(tuned, turn, strict=True)
            )
        else:
            planned = (
                (peer, self.best(contest, peer), seed)
                for seed in range(sizes.seeds)
                for peer in self.present
            )
        for peer, point, seed in planned:
            if point is not None:
                yield Entry(
                    peer,
                    point,
                    seed,
                    limit=sizes.tune_seconds if phase == "tune" else sizes.seconds,
                    until=contest.targets[-1],
                    evaluation_cases=sizes.evaluation_cases,
                    threads=self.config.threads,
                )

    def done(self, contest: Contest, phase: Phase, entry: Entry) -> bool:
        """Whether there is a trial of it."""
        return any(
            trial.seed == entry.seed and trial.point == entry.point
            for trial in self.found(contest, phase, entry.peer)
        )


def run_race(config: RaceConfig, console: Console) -> Race:
    """All of it, what an earlier command left included.

    Raises:
        TrainingInterruptedError: Ctrl-C; what has run is kept.
    """
    path, settings = config.folder / RESULT, _settings(config)
    torch.set_num_threads(config.threads)
    store = TrialStore(path, settings, Trial, key=lambda trial: trial.key)
    race = Race(config, store.values())
    race.absent |= {peer.name: peer.missing for peer in config.peers if peer.missing}
    with store.interruptible():
        python = _kfac_jax(race, console)
        tasks = {c.problem: _task(c.problem) for c in contests_named(config.problems)}
        console.print(_budget(race, tasks))
        columns = (
            TextColumn("{task.description:<44.44}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f} % of this run"),
        )
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("", total=1.0)
            for contest in contests_named(config.problems):
                for phase in ("tune", "race"):
                    for entry in race.entries(contest, phase):
                        if race.done(contest, phase, entry):
                            continue
                        name = f"{contest.problem}, {phase}: {entry.peer.label}"
                        progress.reset(bar, total=entry.limit, description=name)
                        trial = _trial(
                            contest, phase, entry, tasks[contest.problem], python,
                            lambda seconds: progress.advance(bar, seconds),
                        )  # fmt: skip
                        store.keep(trial)
                        console.print(_told(trial, entry, contest))
    return race


def _trial(
    contest: Contest,
    phase: Phase,
    entry: Entry,
    task: Task,
    python: Path | None,
    tick: Callable[[float], None],
) -> Trial:
    if entry.peer.name == KFAC_JAX.name:
        assert python is not None
        rows, message = kfac_jax_runs.run_elsewhere(python, entry, task, tick)
    else:
        rows, message = run_here(entry, task, tick)
    return Trial(
        contest.problem, entry.peer.name, phase, entry.point, entry.seed, entry.limit, rows, message
    )


def _kfac_jax(race: Race, console: Console) -> Path | None:
    """The Python of its environment, if it races and can."""
    if KFAC_JAX.name not in (peer.name for peer in race.config.peers):
        return None
    folder = race.config.jax_env or kfac_jax_runs.default_environment()
    try:
        return kfac_jax_runs.environment(folder, console.print)
    except kfac_jax_runs.NoEnvironmentError as error:
        race.absent[KFAC_JAX.name] = str(error)
        return None


def _task(problem: str) -> Task:
    return load_task(TrainConfig(problem)).to(torch.device("cpu"), torch.float32)


def _budget(race: Race, tasks: dict[str, Task]) -> str:
    """How long what is left takes at most."""
    sizes = race.config.sizes
    optimising = evaluating = 0.0
    for problem, task in tasks.items():
        contest = contests_named((problem,))[0]
        sample, model = task.train.first(sizes.evaluation_cases), task.make_model(0)
        task.error(model, sample)  # the first is slower
        began = time.perf_counter()
        task.error(model, sample)
        evaluation = EVALUATED * (time.perf_counter() - began)
        left = [sizes.tune_seconds for e in race.entries(contest, "tune")
                if not race.done(contest, "tune", e)]  # fmt: skip
        raced = sum(len(race.found(contest, "race", peer)) for peer in race.present)
        left += [sizes.seconds] * (len(race.present) * sizes.seeds - raced)
        optimising += sum(left)
        evaluating += evaluation * sum(len(marks(limit)) for limit in left)
    return (
        f"At most {clock(optimising + evaluating)} (h:mm:ss): {clock(optimising)} of optimiser time and "
        f"about {clock(evaluating)} of evaluation; runs that reach the last target end earlier."
    )


def _told(trial: Trial, entry: Entry, contest: Contest) -> str:
    setting = in_words(entry.point)
    who = f"{contest.problem}, {trial.phase}: {entry.peer.label}{', ' if setting else ''}{setting}"
    if trial.message:
        return f"{who}, seed {trial.seed}: {trial.message}"
    _, _, seconds, error = trial.rows[-1]
    return f"{who}, seed {trial.seed}: {number(error)} after {seconds:.1f} s"


def _settings(config: RaceConfig) -> dict[str, Any]:
    """What a trial depends on; more problems, optimizers and seeds may be asked for later."""
    sizes = asdict(replace(config.sizes, seeds=1))
    del sizes["seeds"]
    return {"kronfac": versions()["kronfac"], "threads": config.threads, **sizes}
