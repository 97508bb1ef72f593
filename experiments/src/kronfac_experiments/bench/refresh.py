"""`kronfac bench refresh`: seconds to refresh the inverse, by width and method [MG15 §4, §6.3, App. B].

In products of two d × d matrices, timed in between: a ratio that does not depend on how fast the machine
multiplies, only on how much slower it decomposes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from rich.console import Console
from torch import Tensor

from kronfac import BlockDiagonalInverse, BlockTridiagonalInverse, ExactTikhonov
from kronfac.curvature import ApproximateInverse, Curvature, KroneckerMoments, Link
from kronfac_experiments.bench.refresh_tables import (
    CHOLESKY,
    EIGH,
    TRIDIAGONAL,
    RefreshTrial,
    plots,
    tables,
)
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, described
from kronfac_experiments.pages.publish import publish

METHODS: dict[str, ApproximateInverse] = {
    CHOLESKY: BlockDiagonalInverse(),
    EIGH: BlockDiagonalInverse(tikhonov=ExactTikhonov()),
    TRIDIAGONAL: BlockTridiagonalInverse(),
}
ROWS = 2
"""Cases that the statistics are taken from, in units of d: factors of full rank."""

LARGE = 512
"""Width from which on a single product is long enough for the clock."""


@dataclass(frozen=True)
class RefreshConfig(BenchOptions):
    """Seconds to refresh the inverse of a uniform chain, by width and method.

    Shown in products of two d × d matrices, timed in between, and a layer. `prepare` is done once a
    refresh, `damped` for every candidate γ.
    """

    widths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    """Rows d of every factor."""
    layers: int = 3
    """Number of layers of the chain; two or more."""
    gamma: float = 0.1
    """Damping strength γ."""
    repeats: int = 5
    """Interleaved, of which the median is shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, widths=self.widths, repeats=self.repeats)
        at_least(2, layers=self.layers)
        if not self.gamma > 0:
            raise ValueError(f"--gamma is positive; got {self.gamma}.")


def refresh_command(config: RefreshConfig) -> list[Path]:
    """Measure what has not been measured; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    path = config.folder("refresh") / "refresh.json"
    settings = config.settings("widths")
    jobs = {f"d = {width}": partial(_measure, config, width) for width in config.widths}
    trials = run_trials(path, settings, RefreshTrial, jobs, console)
    return publish(_document(config, trials), path, config.output, console)


def chain_curvature(width: int, layers: int, seed: int) -> Curvature:
    """Second moments of random rows that correlate from layer to layer."""
    generator = torch.Generator().manual_seed(seed)

    def rows() -> list[Tensor]:
        x = torch.randn(ROWS * width, width, generator=generator)
        chain = [x]
        for _ in range(layers - 1):
            mix = torch.randn(width, width, generator=generator) / width**0.5
            chain.append(torch.tanh(chain[-1] @ mix))
        return chain

    def moment(x: Tensor, y: Tensor) -> Tensor:
        return x.mT @ y / len(x)

    a, g = rows(), rows()
    return Curvature(
        blocks=tuple(KroneckerMoments(*map(moment, pair, pair)) for pair in zip(a, g, strict=True)),
        links=tuple(
            Link(moment(a, a_next), moment(g, g_next))
            for (a, a_next), (g, g_next) in zip(pairwise(a), pairwise(g), strict=True)
        ),
    )


def _measure(config: RefreshConfig, width: int, advance: Advance) -> RefreshTrial:
    curvature = chain_curvature(width, config.layers, config.seed)
    first_block = curvature.blocks[0]
    assert isinstance(first_block, KroneckerMoments)
    matrix = first_block.A
    trial = RefreshTrial(
        name=f"d = {width}",
        width=width,
        product=[],
        prepare={name: [] for name in METHODS},
        damped={name: [] for name in METHODS},
    )
    for repeat in range(config.repeats + 1):
        products = [_product_seconds(matrix)]
        spent: dict[str, tuple[float, float]] = {}
        for name, method in METHODS.items():
            first, prepared = _timed(partial(method.prepare, curvature))
            second, _ = _timed(partial(prepared.damped, config.gamma))
            spent[name] = first, second
            products.append(_product_seconds(matrix))
        advance(1 / (config.repeats + 1))
        if repeat == 0:  # warms up
            continue
        trial.product.append(median(products))
        for name, (first, second) in spent.items():
            trial.prepare[name].append(first)
            trial.damped[name].append(second)
    return trial


def _product_seconds(matrix: Tensor) -> float:
    """Seconds of one product, the mean of as many as the clock needs."""
    count = min(100, max(1, round((LARGE / len(matrix)) ** 3)))
    return _timed(lambda: [matrix @ matrix for _ in range(count)])[0] / count


T = TypeVar("T")


def _timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def _document(config: RefreshConfig, trials: list[RefreshTrial]) -> Document:
    return Document(
        title="Refreshing the inverse",
        command=command_line("bench refresh", config),
        settings=described(
            config.threads,
            config.seed,
            f"uniform chain of {config.layers} layers",
            f"statistics of {ROWS} d cases",
            f"γ = {config.gamma:g}",
            f"{config.repeats} interleaved repeats",
        ),
        tables=tables(trials, config.layers),
        plots=plots(trials),
    )
