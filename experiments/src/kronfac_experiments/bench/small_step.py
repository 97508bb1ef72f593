"""`kronfac bench small-step`: what small networks pay for a step of K-FAC, and what dropout adds to it.

Steps of all optimizers are taken in turn on the same mini-batches; a repeat's ratio is that of two medians.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor, nn

from kronfac import KFAC
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, Table, described
from kronfac_experiments.pages.publish import publish
from kronfac_experiments.plain_steps import GradientSteps, KfacSteps, Steps

WARM_UP = 90
"""Past the refreshes at the start, which the defaults spread over their first eighty iterations."""
FRIEDMAN, WIDE = (10, 50, 50, 50, 1), (64, 256, 256, 10)


@dataclass(frozen=True)
class SmallStepConfig(BenchOptions):
    """What small networks pay for a step of K-FAC, and what dropout adds to it."""

    threads: int = 1
    """CPU threads."""
    repeats: int = 5
    """Repeats; their median, smallest and largest are shown."""
    steps: int = 100
    """Steps in a repeat."""
    clock: Literal["wall", "cpu"] = "wall"
    """Seconds of the clock on the wall, or of this thread alone, for a machine that others use too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, repeats=self.repeats, steps=self.steps)
        if self.clock == "cpu" and self.threads > 1:
            raise ValueError(f"--clock cpu sees one thread; got --threads {self.threads}.")


@dataclass(frozen=True)
class SmallStepTrial:
    """Two kinds of steps, taken in turn."""

    name: str
    first: list[float]
    """Median milliseconds of a step, a repeat each."""
    second: list[float]

    @property
    def ratios(self) -> list[float]:
        """Repeat by repeat."""
        return [a / b for a, b in zip(self.first, self.second, strict=True)]


def small_step_command(config: SmallStepConfig) -> list[Path]:
    """Measure what has not been measured; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    settings = config.settings()
    kfac, dropout = _kfac(FRIEDMAN, nn.MSELoss()), 0.5
    cross_entropy = nn.CrossEntropyLoss()
    jobs = {
        "K-FAC / AdamW, 10-50-50-50-1": (kfac, _adamw(FRIEDMAN, nn.MSELoss()), FRIEDMAN, False),
        "K-FAC with dropout / without, 64-256-256-10": (
            _kfac(WIDE, cross_entropy, dropout),
            _kfac(WIDE, cross_entropy),
            WIDE,
            True,
        ),
    }
    path = config.folder("small-step") / "small_step.json"
    trials = run_trials(
        path,
        settings,
        SmallStepTrial,
        {name: partial(_measure, config, name, *job) for name, job in jobs.items()},
        console,
    )
    return publish(_document(config, trials), path, config.output, console)


def _network(widths: tuple[int, ...], dropout: float = 0.0) -> nn.Sequential:
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs), nn.GELU()]
        if dropout:
            modules.append(nn.Dropout(dropout))
    return nn.Sequential(*modules[: -2 if dropout else -1])


def _kfac(widths: tuple[int, ...], loss: nn.Module, dropout: float = 0.0) -> Callable[[], Steps]:
    return lambda: KfacSteps(KFAC(_network(widths, dropout), loss))


def _adamw(widths: tuple[int, ...], loss: nn.Module) -> Callable[[], Steps]:
    def make() -> Steps:
        model = _network(widths)
        return GradientSteps(model, loss, torch.optim.AdamW(model.parameters()))

    return make


def _measure(
    config: SmallStepConfig,
    name: str,
    first: Callable[[], Steps],
    second: Callable[[], Steps],
    widths: tuple[int, ...],
    classes: bool,
    advance: Advance,
) -> SmallStepTrial:
    torch.manual_seed(config.seed)
    pair = first(), second()
    total = WARM_UP + config.repeats * config.steps
    clock = time.perf_counter if config.clock == "wall" else time.thread_time

    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randn(512, widths[0])
        y = torch.sin(x[:, : widths[-1]])
        return x, y.argmax(dim=1) if classes else y

    def run(count: int) -> tuple[float, float]:
        spent: tuple[list[float], list[float]] = [], []
        for _ in range(count):
            x, y = batch()
            for steps, seconds in zip(pair, spent, strict=True):
                start = clock()
                steps.step(x, y)
                seconds.append(clock() - start)
            advance(1 / total)
        return 1e3 * median(spent[0]), 1e3 * median(spent[1])

    run(WARM_UP)
    repeats = [run(config.steps) for _ in range(config.repeats)]
    return SmallStepTrial(name, [a for a, _ in repeats], [b for _, b in repeats])


def _document(config: SmallStepConfig, trials: list[SmallStepTrial]) -> Document:
    rows = [
        (
            trial.name,
            f"{median(trial.ratios):.2f}",
            f"{min(trial.ratios):.2f} – {max(trial.ratios):.2f}",
            f"{median(trial.first):.2f}",
            f"{median(trial.second):.2f}",
        )
        for trial in trials
    ]
    columns = ("", "ratio, median", "smallest – largest", "first, ms", "second, ms")
    note = "GELU networks, K-FAC's defaults, KFAC.closure in one chunk. Median step of each repeat."
    return Document(
        title="Steps of small networks",
        command=command_line("bench small-step", config),
        settings=described(
            config.threads,
            config.seed,
            f"m = 512, {config.repeats} × {config.steps} interleaved steps",
            f"{'wall-clock' if config.clock == 'wall' else 'CPU'} time",
        ),
        tables=(Table("One step over another", columns, rows, note),),
        plots=(),
    )
