"""What `kronfac figure` is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kronfac_experiments.options import at_least, hint


@dataclass(frozen=True)
class FigureConfig:
    """Make a figure of the paper: PNG, PDF and the numbers as CSV."""

    number: tyro.conf.Positional[int]
    """Figure of the paper: 2, 3, 5, 6, 7, 9, 10 or 11."""
    quick: bool = False
    """A smaller setting. 2, 3, 5 and 6: 2,000 cases instead of 60,000, seconds instead of half a minute.
    7: CURVES, 250 iterations, a minute or two, instead of MNIST, 500 iterations, about an hour.
    9: smaller mini-batches and fewer iterations, about 7 minutes instead of 3 hours. 10 and 11, which
    share their runs: 30 seconds a run, about 9 minutes for both, instead of about 12 hours. From 9 on
    also λ₀ = 1 instead of 150, and errors on 5,000 training cases."""
    output: Path = Path("figures")
    """Folder for the files."""
    runs: Path = Path("runs/figures")
    """Folder for the training runs of 9, 10 and 11; what has run is not run again."""
    seed: int = 0
    """Seed of the initial parameters, the sampled targets and the mini-batches. From 9 on, each seed has
    runs of its own."""
    threads: int = 2
    """CPU threads. From 9 on, each number has runs of its own, since seconds depend on it."""
    cases: Annotated[int | None, hint("INT", "by the setting")] = None
    """Training cases: the first of the set for 2, 3, 5 and 6, of a mini-batch for 7; from 9 on the
    first of the set are those that the error is measured on, and all are trained on."""

    def __post_init__(self) -> None:
        at_least(1, threads=self.threads)
        at_least(2, cases=self.cases)
