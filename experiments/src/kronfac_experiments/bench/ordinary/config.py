"""What `kronfac bench ordinary` is told."""

import math
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch

from kronfac_experiments.bench.ordinary.problems import Problem, problems_named
from kronfac_experiments.config import hint
from kronfac_experiments.machine import machine
from kronfac_experiments.options import at_least

LEARNING_RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""AdamW's grid: half decades."""
TUNING_SEED = 100
"""AdamW's learning rate is chosen on another start than those that count."""


@dataclass(frozen=True)
class OrdinaryConfig:
    """K-FAC as it comes beside AdamW with a tuned learning rate, in equal seconds, on ten small problems.

    K-FAC is KFAC(model, loss), nothing else given. AdamW gets, for each problem, the one of seven
    learning rates with the lowest final training loss, each of them tried for as many seconds as a run.
    Both have no weight decay and run from the same starts, in turns. What counts is the training loss at
    the end, median of the seeds. A comparison that was stopped goes on when the same command is given.
    """

    problems: Annotated[tuple[str, ...], hint("NAME ...", "all ten")] = ()
    """Only these problems."""
    seconds: Annotated[float | None, hint("FLOAT", "10; 1 with --quick")] = None
    """Seconds of optimiser time for each run; evaluating is not counted."""
    seeds: Annotated[int | None, hint("INT", "3; 1 with --quick")] = None
    """How many, from 0: initial parameters and mini-batches."""
    quick: bool = False
    """One second a run and one seed: two minutes, for a first look."""
    threads: int = 1
    """CPU threads; the networks are small."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """Markdown file to write, with a picture beside it."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/bench-ordinary, with -quick")] = None
    """Folder for the results."""

    def __post_init__(self) -> None:
        if not 0 < self.duration < math.inf:
            raise ValueError(f"--seconds is positive and finite; got {self.seconds}.")
        if not 1 <= self.starts <= TUNING_SEED:
            raise ValueError(f"--seeds is 1 to {TUNING_SEED}; got {self.seeds}.")
        at_least(1, threads=self.threads)
        if self.output is not None and self.output.suffix != ".md":
            raise ValueError(f"--output is a .md file; got {self.output}.")
        problems_named(self.problems)

    @property
    def chosen(self) -> tuple[Problem, ...]:
        """The problems."""
        return problems_named(self.problems)

    @property
    def duration(self) -> float:
        """Seconds of a run."""
        usual = 1.0 if self.quick else 10.0
        return usual if self.seconds is None else self.seconds

    @property
    def starts(self) -> int:
        """How many seeds."""
        usual = 1 if self.quick else 3
        return usual if self.seeds is None else self.seeds

    @property
    def folder(self) -> Path:
        """Where the results are."""
        return self.run_dir or Path("runs") / f"bench-ordinary{'-quick' if self.quick else ''}"

    @property
    def described(self) -> str:
        """What the numbers depend on, above every table."""
        return (
            f"{self.duration:g} s of optimiser time a run, {self.starts} seed(s) from 0, "
            f"{self.threads} thread(s), float32, kronfac {version('kronfac')}, "
            f"torch {torch.__version__}, {machine()['processor'] or 'unknown processor'}."
        )
