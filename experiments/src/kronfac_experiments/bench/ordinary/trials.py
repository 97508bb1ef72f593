"""Runs the comparison; every run is written down when it ends, and none is run twice."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kronfac_experiments.bench.ordinary.config import LEARNING_RATES, TUNING_SEED, OrdinaryConfig
from kronfac_experiments.bench.ordinary.problems import PROBLEMS, Problem
from kronfac_experiments.bench.ordinary.run import (
    MARKS,
    Record,
    adamw,
    kfac,
    run_side_by_side,
)
from kronfac_experiments.machine import versions
from kronfac_experiments.progress import clock, number
from kronfac_experiments.trial_store import TrialStore

RESULT = "ordinary.json"
KFAC_NAME, ADAMW_NAME = "K-FAC", "AdamW"


@dataclass(frozen=True)
class Trial:
    """A run: its loss and error at each mark that it reached; None if they were not finite."""

    problem: str
    optimizer: str
    lr: float | None
    seed: int
    train_loss: list[float | None]
    validation_error: list[float | None]
    steps: int
    seconds: float
    """Time of the steps."""
    failure: str = ""
    """Why it ended before its time."""

    @classmethod
    def of(
        cls, problem: Problem, optimizer: str, lr: float | None, seed: int, record: Record
    ) -> "Trial":
        """From what a run did."""
        return cls(
            problem.name,
            optimizer,
            lr,
            seed,
            [_finite(loss) for loss in record.train_loss],
            [_finite(error) for error in record.validation_error],
            record.steps,
            record.seconds,
            record.failure,
        )

    @property
    def key(self) -> "Key":
        """What it is found by."""
        return self.problem, self.optimizer, self.lr, self.seed

    @property
    def losses(self) -> list[float]:
        """Losses at all of MARKS: infinite if not finite, and from the mark at which the run failed."""
        losses = [math.inf if loss is None else loss for loss in self.train_loss]
        if self.failure and len(losses) == len(MARKS):
            losses[-1] = math.inf
        return losses + [math.inf] * (len(MARKS) - len(losses))

    @property
    def end(self) -> float:
        """The training loss at the end; infinite for a run that failed."""
        return self.losses[-1]


Contender = tuple[str, float | None]
"""Name and, for AdamW, learning rate."""
Key = tuple[str, str, float | None, int]
"""Problem, name, learning rate and seed."""
Trials = Mapping[Key, Trial]


def run_trials(config: OrdinaryConfig, console: Console) -> Trials:
    """All trials of these problems and seeds, those of an earlier command included."""
    path, settings = config.folder / RESULT, settings_of(config)
    trials = TrialStore(path, settings, Trial, key=lambda trial: trial.key)
    console.print(_announcement(config, trials))
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=_runs_left(config, trials))
        for problem in config.chosen:
            for seed in (TUNING_SEED, *range(config.starts)):
                if _is_done(problem.name, seed, trials):
                    continue
                contenders = _contenders(problem.name, seed, trials)
                progress.update(bar, description=f"{problem.name}, seed {seed}")
                with trials.interruptible():
                    done = _run(config, problem, contenders, seed)
                trials.keep(*done)
                progress.advance(bar, len(done))
                console.print(f"{problem.name}, seed {seed}: {_outcome(seed, done)}")
    return trials


def _contenders(problem: str, seed: int, trials: Trials) -> list[Contender]:
    """Who runs from this seed, in turns: all learning rates to tune, else K-FAC and AdamW."""
    if seed == TUNING_SEED:
        return [(ADAMW_NAME, lr) for lr in LEARNING_RATES]
    return [(KFAC_NAME, None), (ADAMW_NAME, best_rate(problem, trials))]


def _is_done(problem: str, seed: int, trials: Trials) -> bool:
    """The runs from one seed are kept together, so one of them says it for all."""
    name, lr = (ADAMW_NAME, LEARNING_RATES[0]) if seed == TUNING_SEED else (KFAC_NAME, None)
    return (problem, name, lr, seed) in trials


def _run(
    config: OrdinaryConfig, problem: Problem, contenders: list[Contender], seed: int
) -> list[Trial]:
    makes = [kfac() if lr is None else adamw(lr) for _, lr in contenders]
    records = run_side_by_side(problem, makes, seed, config.duration)
    pairs = zip(contenders, records, strict=True)
    return [Trial.of(problem, name, lr, seed, record) for (name, lr), record in pairs]


def _outcome(seed: int, done: list[Trial]) -> str:
    if seed == TUNING_SEED:
        best = min(done, key=lambda trial: trial.end)
        return f"AdamW's learning rate is {best.lr:g}"
    ends = {trial.optimizer: trial.end for trial in done}
    return ", ".join(
        f"{name} {number(end) if math.isfinite(end) else 'diverged'}" for name, end in ends.items()
    )


def best_rate(problem: str, trials: Trials) -> float:
    """The learning rate with the lowest training loss at the end, on the start for tuning."""
    return min(LEARNING_RATES, key=lambda lr: trials[problem, ADAMW_NAME, lr, TUNING_SEED].end)


def settings_of(config: OrdinaryConfig) -> dict[str, Any]:
    """What a trial depends on; more problems or seeds may be asked for later."""
    return {
        "seconds": config.duration,
        "threads": config.threads,
        "learning_rates": list(LEARNING_RATES),
        "tuning_seed": TUNING_SEED,
        "marks": list(MARKS),
        "kronfac": versions()["kronfac"],
        "problems": {problem.name: problem.description for problem in PROBLEMS.values()},
    }


def _runs_left(config: OrdinaryConfig, trials: Trials) -> int:
    runs = {TUNING_SEED: len(LEARNING_RATES)} | dict.fromkeys(range(config.starts), 2)
    return sum(
        count
        for problem in config.chosen
        for seed, count in runs.items()
        if not _is_done(problem.name, seed, trials)
    )


def _announcement(config: OrdinaryConfig, trials: Trials) -> str:
    left = _runs_left(config, trials)
    if not left:
        return f"All runs are in {config.folder} already."
    return (
        f"{len(config.chosen)} problem(s), {left} runs of {config.duration:g} s: at most "
        f"{clock(left * config.duration)} (h:mm:ss) of optimiser time, and a little for evaluating."
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
