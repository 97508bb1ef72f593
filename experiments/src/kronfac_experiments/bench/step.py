"""`kronfac bench step`: what a K-FAC step costs, in steps of plain SGD [MG15 §8].

Every repeat takes steps of `torch.optim.SGD` and of K-FAC in turn on the same mini-batches, refreshes
of the inverse and searches for γ among them; its ratio is that of the two mean times.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

from kronfac import Bernoulli, Gaussian, ScheduledBatchSampler
from kronfac.settings import LONGEST_LAG
from kronfac_experiments import problems
from kronfac_experiments.bench import operations
from kronfac_experiments.bench.paired_steps import PairedSteps
from kronfac_experiments.bench.schedule import Preset, Schedule, arguments, in_words
from kronfac_experiments.bench.step_tables import StepTrial, plots, tables
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, described
from kronfac_experiments.pages.publish import publish

WARM_UP = {"paper": 4, "default": 84}
"""Past the refreshes at the start, which the default spreads over its first eighty iterations."""

Inverse = Literal["block_diagonal", "block_tridiagonal"]


@dataclass(frozen=True)
class StepConfig(BenchOptions):
    """What a K-FAC step costs, in steps of plain SGD: measured, and counted in operations."""

    problem: Literal["mnist", "curves", "faces"] = "mnist"
    """The autoencoder."""
    preset: Preset = "paper"
    """Constants of the paper's experiments, or of kronfac."""
    batches: tuple[int, ...] = (1000, 5000)
    """Mini-batch sizes m."""
    inverses: tuple[Inverse, ...] = ("block_diagonal", "block_tridiagonal")
    """Approximate inverse Fishers."""
    inverse_lag: int = 0
    """Iterations from the start of a refresh, in the background, to its use. The steps of SGD in between,
    too, are time for it."""
    repeats: int = 5
    """Repeats; their median, smallest and largest are shown."""
    steps: int = 40
    """In a repeat; a multiple of 20, so that refreshes and searches count in full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, batches=self.batches, repeats=self.repeats, steps=self.steps)
        at_least(0, inverse_lag=self.inverse_lag)
        if self.inverse_lag > LONGEST_LAG:
            raise ValueError(f"--inverse-lag is at most {LONGEST_LAG}; got {self.inverse_lag}.")
        cases = problems.PROBLEMS[self.problem].train_cases
        if max(self.batches) > cases:
            raise ValueError(
                f"--batches is at most the {cases:,} cases of {self.problem}; got {max(self.batches)}."
            )
        if not self.inverses:
            raise ValueError("--inverses needs one or more.")


def step_command(config: StepConfig) -> list[Path]:
    """Measure what has not been measured; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    path = config.folder(f"step-{config.problem}-{config.preset}") / "step.json"
    settings = config.settings("batches", "inverses")
    data = cache(lambda: problems.load(config.problem)[0])  # not if everything is there already
    jobs = {
        _name(inverse, batch): partial(_measure, config, inverse, batch, data)
        for inverse in config.inverses
        for batch in config.batches
    }
    trials = run_trials(path, settings, StepTrial, jobs, console)
    return publish(_document(config, trials), path, config.output, console)


def _measure(
    config: StepConfig, inverse: Inverse, batch: int, data: Callable[[], Tensor], advance: Advance
) -> StepTrial:
    problem, train = problems.PROBLEMS[config.problem], data()
    pair = PairedSteps(
        lambda: problems.build_model(problem, config.seed),
        Bernoulli() if problem.loss == "bernoulli" else Gaussian(),
        {
            "inverse": inverse,
            "inverse_lag": config.inverse_lag,
            "weight_decay": problem.weight_decay,
            **arguments(config.preset),
        },
    )
    sampler = ScheduledBatchSampler(len(train), batch, seed=config.seed)
    total = WARM_UP[config.preset] + config.repeats * config.steps
    sgd, kfac = [], []
    parts: dict[str, float] = defaultdict(float)

    def steps(count: int) -> None:
        seconds = []
        for _ in range(count):
            x = train[sampler.next_indices()]
            seconds.append(pair.step(x, x))
            advance(1 / total)
        sgd.append(mean(one.sgd for one in seconds))
        kfac.append(mean(one.kfac for one in seconds))
        for one in seconds:
            for part, spent in one.parts.items():
                parts[part] += spent / (config.repeats * count)

    steps(WARM_UP[config.preset])
    for record in (sgd, kfac, parts):
        record.clear()
    for _ in range(config.repeats):
        steps(config.steps)
    shapes = operations.shapes_of(problem.layers)
    schedule = Schedule.of(pair.kfac.settings, batch)
    return StepTrial(
        name=_name(inverse, batch),
        inverse=inverse,
        batch=batch,
        sgd_seconds=sgd,
        kfac_seconds=kfac,
        parts=dict(parts),
        operations=operations.kfac(shapes, batch, schedule, inverse == "block_tridiagonal"),
        sgd_operations=operations.sgd(shapes, batch),
    )


def _name(inverse: Inverse, batch: int) -> str:
    return f"{inverse.replace('_', '-')}, m = {batch}"


def _document(config: StepConfig, trials: list[StepTrial]) -> Document:
    return Document(
        title="Cost of a step",
        command=command_line("bench step", config),
        settings=described(
            config.threads,
            config.seed,
            f"{config.problem} autoencoder",
            f"preset {config.preset} ({in_words(config.preset)})",
            f"m = {' and '.join(f'{batch:,}' for batch in config.batches)}",
            f"{config.repeats} × {config.steps} interleaved steps",
            "KFAC.closure in one chunk",
            *([f"refreshes in use after {lag} iterations"] if (lag := config.inverse_lag) else []),
        ),
        tables=tables(trials),
        plots=plots(trials),
    )
