"""Runs the rows; every run is written down when it ends, and none is run twice."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from kronfac_experiments.ablation.config import AblateConfig
from kronfac_experiments.ablation.rows import Row
from kronfac_experiments.config import resolved
from kronfac_experiments.machine import versions
from kronfac_experiments.optimizers import DivergedError
from kronfac_experiments.progress import number
from kronfac_experiments.session import Session
from kronfac_experiments.task import Task
from kronfac_experiments.trial_store import TrialStore

RESULT = "ablate.json"
MARKS = (0.25, 0.5, 1.0)
"""Shares of the iterations at which the error is measured."""


@dataclass(frozen=True)
class Trial:
    """A run: errors at a quarter, half and all of its iterations; None if it diverged."""

    row: str
    variant: str
    seed: int
    errors: list[float | None]
    averaged: float | None
    """Error of the averaged iterates at the end."""
    seconds: float
    """Time of the steps."""

    @property
    def end(self) -> float:
        """The error at the end, infinite if it diverged."""
        return or_infinite(self.errors[-1])


Trials = Mapping[tuple[str, str, int], Trial]
"""By row, variant and seed."""


def or_infinite(error: float | None) -> float:
    """An error to compare with others."""
    return math.inf if error is None else error


def run_trials(config: AblateConfig, task: Task, rows: Sequence[Row], console: Console) -> Trials:
    """All trials of these seeds, those of an earlier command included.

    Args:
        config: With sizes that fit the task.
        task: On the device.
        rows: What to run.
        console: To show progress on.
    """
    path, settings = config.folder / RESULT, _settings(config, task)
    trials = TrialStore(path, settings, Trial, key=lambda t: (t.row, t.variant, t.seed))
    sizes = config.sizes
    columns = (
        TextColumn("{task.description:<40.40}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} iterations"),
        TimeRemainingColumn(),
    )
    runs = sum((len(row.variants) + sizes.seeds - 1) * row.stretch for row in rows if row.variants)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=runs * sizes.iterations)
        for row in rows:
            progress.update(bar, description=row.name)
            for variant, seed in _order(row, sizes.seeds, trials):
                if (row.name, variant, seed) in trials:
                    progress.advance(bar, row.stretch * sizes.iterations)
                    continue
                with trials.interruptible():
                    trial = _run(config, task, row, variant, seed, lambda: progress.advance(bar))
                trials.keep(trial)
                name = f"{row.name}, {variant}" if variant else row.name
                console.print(f"{name}, seed {seed}: {number(trial.end)}")
    return {key: trial for key, trial in trials.items() if trial.seed < sizes.seeds}


def _order(row: Row, seeds: int, trials: Trials) -> Iterator[tuple[str, int]]:
    """Every variant on the first seed, then the best of them on the others."""
    for variant in row.variants:
        yield variant, 0
    if row.variants:
        for seed in range(1, seeds):
            yield best_variant(row, trials), seed


def best_variant(row: Row, trials: Trials) -> str:
    """The one with the lowest error at the end on the first seed."""
    return min(row.variants, key=lambda variant: trials[row.name, variant, 0].end)


def _run(
    config: AblateConfig, task: Task, row: Row, variant: str, seed: int, tick: Callable[[], None]
) -> Trial:
    iterations = config.sizes.iterations * row.stretch
    marks = [max(1, round(share * iterations)) for share in MARKS]
    run = resolved(
        config.run(seed, iterations), cases=len(task.train), weight_decay=task.weight_decay
    )
    session = Session(run, task, row.variants[variant])
    sample = task.train.first(config.sizes.evaluation_cases)
    errors: list[float | None] = []
    averaged = None
    try:
        for k in range(1, iterations + 1):
            session.step()
            errors += [_finite(task.error(session.model, sample)) for mark in marks if mark == k]
            tick()
        averaged = _finite(task.error(session.average or session.model, sample))
    except DivergedError:
        errors += [None] * (len(marks) - len(errors))
    return Trial(row.name, variant, seed, errors, averaged, session.seconds)


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _settings(config: AblateConfig, task: Task) -> dict[str, Any]:
    """What a trial depends on; more rows or seeds may be asked for later."""
    sizes = asdict(config.sizes)
    del sizes["seeds"]
    return {
        "problem": config.source.problem,
        "data": None if config.data is None else str(config.data),
        "data_sha256": task.sha256,
        "layers": config.layers,
        "kronfac": versions()["kronfac"],
        "lambda0": config.lambda0,
        "device": config.device,
        "threads": config.threads,
        **sizes,
    }
