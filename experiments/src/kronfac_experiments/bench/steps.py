"""`kronfac bench step`, `small-step` and `network-step`: what a step of K-FAC costs [MG15 §8].

Steps of K-FAC and of another optimizer are taken in turn on the same mini-batches: machines are noisy and
change their clock, so that only times taken beside each other compare.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any, Literal, Protocol, get_args

import torch
from rich.console import Console
from torch import Tensor, nn

from kronfac import KFAC, Bernoulli, Gaussian, KronfacError, plan, presets
from kronfac_experiments import problems
from kronfac_experiments.bench import BenchOptions, publish
from kronfac_experiments.options import at_least
from kronfac_experiments.pages.document import Table
from kronfac_experiments.race.models import ViT, vit_lora
from kronfac_experiments.race.problems import PROBLEMS

SETTLED = {"paper": 4, "default": 84}
"""Steps after which refreshes are as rare as they become."""
FRIEDMAN, WIDE = (10, 50, 50, 50, 1), (64, 256, 256, 10)
LR = 1e-4
"""Of the other optimizer; time does not depend on it, as long as nothing becomes infinite."""
Batches = Iterator[tuple[Tensor, Tensor]]
Inverse = Literal["block_diagonal", "block_tridiagonal"]
Network = Literal[
    "cnn", "resnet", "conv_autoencoder", "gpt", "lstm", "tabular", "vit", "vit_small", "vit_lora"
]
VITS: dict[str, Callable[[], nn.Module]] = {
    "vit_small": partial(ViT, patch=7, width=32, layers=2),
    "vit_lora": vit_lora,
}
"""Other vision transformers than that of the race."""


class Steps(Protocol):
    """An optimizer on a model and a loss."""

    def step(self, x: Tensor, y: Tensor) -> object:
        """One step on a mini-batch."""
        ...


@dataclass(frozen=True)
class KfacSteps:
    """Steps of K-FAC with the closure that it makes itself."""

    optimizer: KFAC

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on a mini-batch."""
        self.optimizer.step(self.optimizer.closure(x, y))


@dataclass(frozen=True)
class GradientSteps:
    """Steps of an optimizer that needs the gradient alone."""

    model: nn.Module
    loss: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on a mini-batch."""
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()


@dataclass(frozen=True)
class Measured:
    """Steps of two optimizers.

    Args:
        name: What was measured.
        first: Seconds of a step of the first one, a number for each repeat.
        second: The same for the second one.
        parts: Share of each part in the first one's steps, if that is K-FAC.
        start: Seconds of the first one's first step.
    """

    name: str
    first: list[float]
    second: list[float]
    parts: dict[str, float]
    start: float

    @property
    def ratios(self) -> list[float]:
        """First over second, repeat by repeat."""
        return [a / b for a, b in zip(self.first, self.second, strict=True)]


def interleaved(
    name: str,
    pair: tuple[Steps, Steps],
    batches: Batches,
    counts: tuple[int, int, int],
    clock: Callable[[], float],
    middle: Callable[[Sequence[float]], float] = mean,
) -> Measured:
    """Take steps in turn: warm-up, repeats and steps of a repeat are the counts.

    Raises:
        KronfacError: K-FAC took no step, so that its time means nothing.
    """
    warm_up, repeats, steps = counts
    kfac = pair[0].optimizer if isinstance(pair[0], KfacSteps) else None
    parts: dict[str, float] = {}

    def take(count: int) -> tuple[list[float], list[float]]:
        spent: tuple[list[float], list[float]] = [], []
        for _ in range(count):
            x, y = next(batches)
            for one, seconds in zip(pair, spent, strict=True):
                began = clock()
                one.step(x, y)
                seconds.append(clock() - began)
            if kfac is not None and kfac.report is not None:
                if kfac.report.refused:
                    raise KronfacError(f"A step was refused: {kfac.report.events[0].message}")
                for part, seconds_of_part in kfac.report.seconds.items():
                    parts[part] = parts.get(part, 0.0) + seconds_of_part
        return spent

    start = take(warm_up)[0][0]
    parts.clear()
    spent = [take(steps) for _ in range(repeats)]
    total = sum(parts.values()) or 1.0
    return Measured(
        name,
        [middle(a) for a, _ in spent],
        [middle(b) for _, b in spent],
        {part: seconds / total for part, seconds in parts.items()},
        start,
    )


def ratio_table(heading: str, other: str, found: Sequence[Measured], note: str = "") -> Table:
    """One step over another."""
    rows = [
        (
            m.name,
            f"{median(m.ratios):.2f}",
            f"{min(m.ratios):.2f} – {max(m.ratios):.2f}",
            f"{1e3 * median(m.first):.2f}",
            f"{1e3 * median(m.second):.2f}",
            f"{m.start:.2f}",
        )
        for m in found
    ]
    columns = ("", "ratio", "smallest – largest", "K-FAC, ms", f"{other}, ms", "first step, s")
    return Table(heading, columns, rows, note)


def parts_table(found: Sequence[Measured], other: str) -> Table:
    """Parts of K-FAC's step in steps of the other optimizer."""
    names = list(dict.fromkeys(part for m in found for part in m.parts))
    rows = [
        (part.replace("_", " "), *(f"{median(m.ratios) * m.parts.get(part, 0):.2f}" for m in found))
        for part in names
    ]
    return Table(f"By part, in steps of {other}", ("part", *(m.name for m in found)), rows)


def _against_sgd(
    build: Callable[[], nn.Module], loss: nn.Module, **options: Any
) -> tuple[Steps, Steps]:
    kfac = KfacSteps(KFAC(build(), loss, **options))
    model = build()
    sgd = torch.optim.SGD(model.parameters(), lr=LR)
    return kfac, GradientSteps(model, loss, sgd)


# ---------------------------------------------------------------------------- the paper's autoencoders


@dataclass(frozen=True)
class StepConfig(BenchOptions):
    """What a step of K-FAC costs on the paper's autoencoders, in steps of SGD."""

    problem: Literal["mnist", "curves", "faces"] = "mnist"
    """The autoencoder."""
    preset: Literal["paper", "default"] = "paper"
    """Constants of the paper's experiments, or of kronfac."""
    batches: tuple[int, ...] = (1000, 5000)
    """Mini-batch sizes m."""
    inverses: tuple[Inverse, ...] = ("block_diagonal", "block_tridiagonal")
    """Approximate inverse Fishers."""
    repeats: int = 5
    """Repeats; their median, smallest and largest are shown."""
    steps: int = 40
    """In a repeat; a multiple of 20, so that refreshes and searches count in full."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, batches=self.batches, repeats=self.repeats, steps=self.steps)
        cases = problems.PROBLEMS[self.problem].train_cases
        if max(self.batches) > cases:
            raise ValueError(
                f"--batches is at most the {cases:,} cases of {self.problem}; got {max(self.batches)}."
            )
        if not self.inverses:
            raise ValueError("--inverses needs one or more.")


def step_command(config: StepConfig) -> list[Path]:
    """Measure, show and write."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    problem, train = problems.PROBLEMS[config.problem], problems.load(config.problem)[0]
    constants = presets.paper() if config.preset == "paper" else {}
    counts = SETTLED[config.preset], config.repeats, config.steps

    def batches(size: int) -> Batches:
        generator = torch.Generator().manual_seed(config.seed)
        while True:
            x = train[torch.randint(len(train), (size,), generator=generator)]
            yield x, x

    found = []
    for inverse in config.inverses:
        for size in config.batches:
            name = f"{inverse.replace('_', '-')}, m = {size}"
            console.print(name)
            pair = _against_sgd(
                partial(problems.build_model, problem, config.seed),
                Bernoulli() if problem.loss == "bernoulli" else Gaussian(),
                inverse=inverse,
                weight_decay=problem.weight_decay,
                **constants,
            )
            found.append(interleaved(name, pair, batches(size), counts, time.perf_counter))
    settings = (
        f"{config.problem} autoencoder",
        f"preset {config.preset}",
        f"{config.repeats} × {config.steps} interleaved steps",
    )
    tables = ratio_table("K-FAC / SGD", "SGD", found), parts_table(found, "SGD")
    return publish("step", "Cost of a step", config, settings, tables)


# ------------------------------------------------------------------------------------ small networks


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


def small_step_command(config: SmallStepConfig) -> list[Path]:
    """Measure, show and write."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    counts = SETTLED["default"], config.repeats, config.steps
    clock = time.perf_counter if config.clock == "wall" else time.thread_time
    cross_entropy, small = nn.CrossEntropyLoss(), _perceptron(FRIEDMAN)
    adamw = GradientSteps(small, nn.MSELoss(), torch.optim.AdamW(small.parameters()))
    kfac = KfacSteps(KFAC(_perceptron(FRIEDMAN), nn.MSELoss()))
    with_dropout, without = (
        KfacSteps(KFAC(_perceptron(WIDE, dropout), cross_entropy)) for dropout in (0.5, 0.0)
    )
    found = [
        interleaved(name, pair, _random_batches(widths, classes), counts, clock, median)
        for name, pair, widths, classes in (
            ("K-FAC / AdamW, 10-50-50-50-1", (kfac, adamw), FRIEDMAN, False),
            ("K-FAC with dropout / without, 64-256-256-10", (with_dropout, without), WIDE, True),
        )
    ]
    settings = (
        f"m = 512, {config.repeats} × {config.steps} interleaved steps",
        f"{config.clock} clock",
    )
    tables = (ratio_table("One step over another", "the other", found),)
    return publish("small-step", "Steps of small networks", config, settings, tables)


def _perceptron(widths: tuple[int, ...], dropout: float = 0.0) -> nn.Sequential:
    modules: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        modules += [nn.Linear(inputs, outputs), nn.GELU()]
        if dropout:
            modules.append(nn.Dropout(dropout))
    return nn.Sequential(*modules[: -2 if dropout else -1])


def _random_batches(widths: tuple[int, ...], classes: bool) -> Batches:
    while True:
        x = torch.randn(512, widths[0])
        y = torch.sin(x[:, : widths[-1]])
        yield x, y.argmax(dim=1) if classes else y


# --------------------------------------------------------------------------------- the race's networks


@dataclass(frozen=True)
class NetworkStepConfig(BenchOptions):
    """What a step of K-FAC costs on networks of the race, in steps of SGD."""

    threads: int = 1
    """CPU threads."""
    networks: tuple[Network, ...] = get_args(Network)
    """Networks of `kronfac race`, and small vision transformers, one with adapters of low rank."""
    batch: int | None = None
    """The mini-batch size; None for the race's."""
    warm_up: int = 22
    """Steps before: λ settles in the first twenty, with a measurement of ρ in each."""
    repeats: int = 3
    """Repeats; their median, smallest and largest are shown."""
    steps: int = 10
    """Steps in a repeat."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(
            1,
            repeats=self.repeats,
            steps=self.steps,
            warm_up=self.warm_up,
            batch=self.batch or 1,
        )
        if not self.networks:
            raise ValueError("--networks needs one or more.")


def network_step_command(config: NetworkStepConfig) -> list[Path]:
    """Measure, show and write."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    counts = config.warm_up, config.repeats, config.steps
    found, planned = [], []
    for name in config.networks:
        problem = PROBLEMS["vit" if name in VITS else name]
        if name in VITS:
            problem = replace(problem, build=VITS[name])
        size = config.batch or problem.batches[-1] or problem.examples
        console.print(name)
        pair = _against_sgd(partial(problem.make_model, config.seed), problem.loss())
        batches: Any = problem.shuffled(size, config.seed)
        x, y = next(batches)
        planned.append(plan(problem.make_model(config.seed), problem.loss(), x, y).sgd_steps)
        found.append(interleaved(f"{name}, m = {size}", pair, batches, counts, time.process_time))
    pairs = zip(found, planned, strict=True)
    rows = [(m.name, f"{steps:.2f}", f"{median(m.ratios):.2f}") for m, steps in pairs]
    settings = (
        f"{config.repeats} × {config.steps} interleaved steps after {config.warm_up}",
        "CPU time",
    )
    tables = (
        ratio_table("K-FAC / SGD", "SGD", found),
        parts_table(found, "SGD"),
        Table("SGD steps by `kronfac.plan`", ("", "planned", "measured"), rows),
    )
    return publish("network-step", "Steps of networks", config, settings, tables)
