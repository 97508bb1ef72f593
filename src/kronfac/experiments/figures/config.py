"""What `kronfac figure` is told."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class FigureConfig:
    """Make a figure of the paper: PNG, PDF and the numbers as CSV."""

    number: tyro.conf.Positional[int]
    """Figure of the paper: 2, 3, 5, 6 or 7."""
    quick: bool = False
    """A smaller setting. 2, 3, 5 and 6: 2,000 cases instead of 60,000, seconds instead of half a minute.
    7: CURVES, 250 iterations, a minute or two, instead of MNIST, 500 iterations, about an hour."""
    output: Path = Path("figures")
    """Folder for the files."""
    seed: int = 0
    """Of the initial parameters, the sampled targets and the mini-batches."""
    threads: int = 2
    """CPU threads."""
    cases: Annotated[
        int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="(default: by the setting)")
    ] = None
    """Training cases: the first of the set for 2, 3, 5 and 6, of a mini-batch for 7."""

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads is 1 or more; got {self.threads}.")
        if self.cases is not None and self.cases < 2:
            raise ValueError(f"cases is 2 or more; got {self.cases}.")
