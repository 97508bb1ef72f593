"""`kronfac bench orders`: how far the end of a short run depends on the order of its examples.

Wisconsin's breast cancer data in full batches: around step thirty the loss falls tenfold in a few steps,
and the numbers that draw S₁, S₂ and the targets decide how far it has come. So one run says nothing; the
median over many orders does. Random examples for S₁ and S₂ stand beside the first ones: of mini-batches in
random order the two are the same in distribution.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
from rich.console import Console
from sklearn import datasets
from torch import Tensor, nn

from kronfac import KFAC, First
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, Table, described
from kronfac_experiments.pages.publish import publish

INVERSES = ("block_diagonal", "block_tridiagonal")
CANCER_WIDTHS = (30, 32, 32, 1)
STEPS = 30


def standardised(x: Tensor) -> Tensor:
    """Columns with mean 0 and deviation 1; a constant one is 0."""
    deviation = x.std(dim=0)
    return (x - x.mean(dim=0)) / torch.where(deviation > 0, deviation, 1)


def cancer() -> tuple[Tensor, Tensor]:
    """Inputs (569, 30) and targets (569, 1), float64."""
    x, y = map(torch.from_numpy, datasets.load_breast_cancer(return_X_y=True))
    return standardised(x), y.double()[:, None]


def network(widths: tuple[int, ...], activation: type[nn.Module]) -> nn.Sequential:
    """A perceptron, float64, always with the same initial parameters."""
    modules: list[nn.Module] = []
    generator = torch.Generator().manual_seed(0)
    for inputs, outputs in pairwise(widths):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.float64)
        nn.init.normal_(layer.weight, std=inputs**-0.5, generator=generator)
        nn.init.zeros_(layer.bias)
        modules += [layer, activation()]
    return nn.Sequential(*modules[:-1])


def batches(
    x: Tensor, y: Tensor, examples: int, seed: int, steps: int = STEPS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches of examples in random order, each drawn anew from all of them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = torch.randperm(len(x), generator=generator)[:examples]
        yield x[rows], y[rows]


@dataclass(frozen=True)
class OrdersConfig(BenchOptions):
    """How far the end of a short run depends on the order of its examples."""

    threads: int = 1
    """CPU threads."""
    seed: int = 1
    """Seed of the first order; the others follow."""
    orders: int = 12
    """Orders of the examples."""
    steps: int = STEPS
    """Steps of a run."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(2, orders=self.orders)
        at_least(1, steps=self.steps)


@dataclass(frozen=True)
class OrdersTrial:
    """The same run with its examples in several orders."""

    name: str
    losses: list[float]
    """Loss of the last mini-batch, before its step."""


def orders_command(config: OrdersConfig) -> list[Path]:
    """Run what has not been run; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    settings = config.settings()
    x, _ = cancer()
    usual = 250 / len(x)  # what KFAC takes by itself of so few
    subsets: dict[str, dict[str, Any]] = {
        "random": {},
        "first": {"statistics_fraction": First(usual), "fisher_fraction": First(usual)},
    }
    jobs = {
        f"{inverse}, {name} examples": partial(
            _measure, config, f"{inverse}, {name} examples", {"inverse": inverse} | fractions
        )
        for inverse in INVERSES
        for name, fractions in subsets.items()
    }
    path = config.folder("orders") / "orders.json"
    trials = run_trials(path, settings, OrdersTrial, jobs, console)
    return publish(_document(config, trials), path, config.output, console)


def _measure(
    config: OrdersConfig, name: str, options: dict[str, Any], advance: Advance
) -> OrdersTrial:
    x, y = cancer()
    losses = []
    for seed in range(config.seed, config.seed + config.orders):
        optimizer = KFAC(network(CANCER_WIDTHS, nn.Sigmoid), nn.BCEWithLogitsLoss(), **options)
        run = batches(x, y, len(x), seed, config.steps)
        losses.append([float(optimizer.step(optimizer.closure(*batch))) for batch in run][-1])
        advance(1 / config.orders)
    return OrdersTrial(name, losses)


def _document(config: OrdersConfig, trials: list[OrdersTrial]) -> Document:
    def row(trial: OrdersTrial) -> list[str]:
        low, _, high = quantiles(trial.losses, n=4, method="inclusive")
        numbers = median(trial.losses), low, high, min(trial.losses), max(trial.losses)
        middle, low_, high_, least, most = (f"{number:.2g}" for number in numbers)
        return [trial.name, middle, f"{low_} – {high_}", f"{least} – {most}"]

    last = config.seed + config.orders - 1
    return Document(
        title="A short run with its examples in several orders",
        command=command_line("bench orders", config),
        settings=described(
            config.threads,
            config.seed,
            f"breast cancer, {'-'.join(map(str, CANCER_WIDTHS))}, sigmoid, all 569 examples, "
            f"{config.steps} steps, K-FAC's defaults, orders by the seeds {config.seed} to {last}",
            precision="float64",
        ),
        tables=(
            Table(
                "Loss at the end",
                ("", "median", "quartiles", "smallest – largest"),
                [row(trial) for trial in trials],
                "Loss before the last step. S₁ and S₂ are 250 examples, drawn at random or the first ones.",
            ),
        ),
    )
