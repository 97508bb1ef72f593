"""What `kronfac ablate` is told."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from kronfac_experiments.ablation.rows import LONG, rows_named
from kronfac_experiments.config import KfacOptions, TrainConfig, hint
from kronfac_experiments.options import command_line, override


@dataclass(frozen=True)
class Sizes:
    """How much is run."""

    iterations: int
    batch: int
    seeds: int
    evaluation_cases: int


FULL = Sizes(iterations=100, batch=1000, seeds=3, evaluation_cases=10_000)
QUICK = Sizes(iterations=40, batch=500, seeds=1, evaluation_cases=2000)


@dataclass(frozen=True)
class AblateConfig:
    """Change one part of K-FAC at a time and see what it was good for.

    K-FAC has the block-diagonal inverse and the paper's constants (τ₁ = 1/8, τ₂ = 1/4, T₁ = 5,
    T₂ = T₃ = 20) but for λ₀. Where a method has a constant to choose by hand, the best of a few is
    taken by its error on the first seed. First-order rows run five times as many iterations.
    """

    problem: Annotated[
        str | None, tyro.conf.Positional, hint("PROBLEM", "mnist, or none with --data")
    ] = None
    """curves, mnist, faces, mnist16 or friedman."""
    data: Annotated[Path | None, hint("FILE.npz", "none")] = None
    """Your own cases, as for kronfac train."""
    layers: Annotated[str | None, hint("WIDTHS", "none")] = None
    """With --data: widths of the encoder, such as 784,100,30."""
    rows: Annotated[tuple[str, ...], hint("WORD ...", "all")] = ()
    """Only the rows with one of these words in their names, and those they are compared with."""
    quick: bool = False
    """One seed, 40 iterations, mini-batches of 500, error on 2,000 cases: a few minutes, not half an
    hour."""
    iterations: Annotated[int | None, hint("INT", "100; 40 with --quick")] = None
    """Iterations of each run."""
    batch: Annotated[int | None, hint("INT", "1000; 500 with --quick")] = None
    """Cases in a mini-batch."""
    lambda0: float = 1.0
    """First λ of every row."""
    seeds: Annotated[int | None, hint("INT", "3; 1 with --quick")] = None
    """How many, from 0: initial parameters, mini-batches and sampled targets."""
    evaluation_cases: Annotated[int | None, hint("INT", "10000; 2000 with --quick")] = None
    """Training cases that the error is measured on, the first ones of the set."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/ablate-PROBLEM, with -quick")] = None
    """Folder for the results."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, mps, …"""
    threads: int = 2
    """CPU threads."""

    def __post_init__(self) -> None:
        for name, value in asdict(self.sizes).items():
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} is 1 or more; got {value}.")
        if not 0 < self.lambda0 < math.inf:
            raise ValueError(f"--lambda0 is positive and finite; got {self.lambda0}.")
        rows_named(self.rows)
        self.source  # noqa: B018 - reading it checks it

    @property
    def sizes(self) -> Sizes:
        """As given, or as the setting has them."""
        return override(QUICK if self.quick else FULL, self)

    @property
    def source(self) -> TrainConfig:
        """What names the data and the network."""
        return TrainConfig(
            problem=self.problem if self.problem or self.data else "mnist",
            data=self.data,
            layers=self.layers,
            device=self.device,
            threads=self.threads,
        )

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        quick = "-quick" if self.quick else ""
        return self.run_dir or Path("runs") / f"ablate-{self.source.name}{quick}"

    def fitted(self, cases: int) -> "AblateConfig":
        """With sizes that a training set of so many cases has."""
        sizes = self.sizes
        return replace(
            self,
            batch=min(sizes.batch, cases),
            evaluation_cases=min(sizes.evaluation_cases, cases),
        )

    def run(self, seed: int, iterations: int) -> TrainConfig:
        """What all rows share, to be resolved; the optimizer is the row's own."""
        return replace(
            self.source,
            kfac=KfacOptions(preset="paper", lambda0=self.lambda0),
            batch=self.sizes.batch,
            seed=seed,
            average=iterations // 2 + 1,
        )

    @property
    def command(self) -> str:
        """What to type for the same."""
        return command_line("ablate", self, positional=("problem",))

    @property
    def setting(self) -> str:
        """In words."""
        sizes = self.sizes
        return (
            f"{self.source.name}, {sizes.iterations} iterations (first-order rows {LONG} times as "
            f"many), mini-batches of {sizes.batch}, λ₀ = {self.lambda0:g}, {sizes.seeds} seed(s) from "
            f"0, training error on {sizes.evaluation_cases:,} cases, {self.threads} thread(s), float32"
        )
