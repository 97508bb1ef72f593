"""Runs the rows; every run is written down when it ends, and none is run twice."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from kronfac.errors import KronfacError
from kronfac.experiments.ablation.config import AblateConfig
from kronfac.experiments.ablation.rows import Row, Start
from kronfac.experiments.machine import machine, versions
from kronfac.experiments.progress import number
from kronfac.experiments.run_directory import RunError, write_json
from kronfac.experiments.task import Task, load_task
from kronfac.likelihoods.base import Likelihood
from kronfac.optimizer import KFAC
from kronfac.training import ScheduledBatchSampler, averaged

RESULT = "ablate.json"
MARKS = (0.25, 0.5, 1.0)
"""Shares of the iterations at which the error is measured."""
AVERAGING_STARTS = 0.5
"""Share of the iterations after which the iterates are averaged."""


@dataclass(frozen=True)
class Trial:
    """A run: errors at a quarter, half and all of its iterations; None where it diverged."""

    row: str
    variant: str
    seed: int
    errors: list[float | None]
    averaged: float | None
    """Error of the averaged iterates at the end."""
    seconds: float
    """Of the steps."""

    @property
    def end(self) -> float:
        """The error at the end, infinite where it diverged."""
        return or_infinite(self.errors[-1])


Trials = dict[tuple[str, str, int], Trial]
"""By row, variant and seed."""


def or_infinite(error: float | None) -> float:
    """An error to compare with others."""
    return math.inf if error is None else error


def run_trials(config: AblateConfig, rows: Sequence[Row], console: Console) -> Trials:
    """All trials of these seeds, those of an earlier command included."""
    torch.set_num_threads(config.threads)
    task = load_task(config.source).to(torch.device(config.device), torch.float32)
    trials = _finished(config)
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
                trial = _run_or_explain(config, task, row, variant, seed, progress, bar)
                trials[row.name, variant, seed] = trial
                _save(config, trials.values())
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


def _run_or_explain(
    config: AblateConfig,
    task: Task,
    row: Row,
    variant: str,
    seed: int,
    progress: Progress,
    bar: Any,
) -> Trial:
    try:
        return _run(config, task, row, variant, seed, lambda: progress.advance(bar))
    except KeyboardInterrupt:
        error = KronfacError(
            f"Stopped; the finished runs are in {config.folder}. Continue with the same command."
        )
        error.exit_code = 130  # type: ignore[attr-defined]
        raise error from None


def _run(
    config: AblateConfig, task: Task, row: Row, variant: str, seed: int, tick: Callable[[], None]
) -> Trial:
    sizes = config.sizes
    inputs = task.train.inputs
    model: nn.Module = task.make_model(seed).to(inputs.device)
    start = Start(model, task.loss, task.weight_decay, config.lambda0, seed)
    optimizer = row.variants[variant](start)
    sampler = ScheduledBatchSampler(len(inputs), min(sizes.batch, len(inputs)), seed=seed)
    sample = task.train.first(sizes.evaluation_cases)
    iterations = sizes.iterations * row.stretch
    marks = [max(1, round(share * iterations)) for share in MARKS]
    average = averaged(model)
    errors: list[float | None] = []
    seconds = 0.0
    for k in range(1, iterations + 1):
        indices = sampler.next_indices().to(inputs.device)
        x = inputs[indices]
        y = x if task.train.targets is inputs else task.train.targets[indices]
        began = time.perf_counter()
        _step(optimizer, model, task.loss, x, y)
        seconds += time.perf_counter() - began
        if k > AVERAGING_STARTS * iterations:
            average.update_parameters(model)
        errors += [_finite(task.error(model, sample)) for mark in marks if mark == k]
        tick()
    return Trial(row.name, variant, seed, errors, _finite(task.error(average, sample)), seconds)


def _step(
    optimizer: torch.optim.Optimizer, model: nn.Module, loss: Likelihood, x: Tensor, y: Tensor
) -> None:
    if isinstance(optimizer, KFAC):
        optimizer.step(optimizer.closure(x, y))
        return
    optimizer.zero_grad()
    loss(model(x), y).backward()
    optimizer.step()


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _settings(config: AblateConfig) -> dict[str, Any]:
    """What a trial depends on; more rows or seeds may be asked for later."""
    sizes = asdict(config.sizes)
    del sizes["seeds"]
    return {
        "problem": config.source.problem,
        "data": None if config.data is None else str(config.data),
        "layers": config.layers,
        "lambda0": config.lambda0,
        "device": config.device,
        "threads": config.threads,
        **sizes,
    }


def _save(config: AblateConfig, trials: Iterable[Trial]) -> None:
    config.folder.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": _settings(config),
        "trials": [asdict(trial) for trial in trials],
        "versions": versions(),
        "machine": machine(),
    }
    write_json(config.folder / RESULT, content)


def _finished(config: AblateConfig) -> Trials:
    """What an earlier command left."""
    path = config.folder / RESULT
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        settings = content["settings"]
        trials = [Trial(**trial) for trial in content["trials"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error!r}. Delete it.") from error
    if settings != _settings(config):
        raise RunError(f"{path} is of other settings; name another folder with --run-dir.")
    return {(trial.row, trial.variant, trial.seed): trial for trial in trials}
