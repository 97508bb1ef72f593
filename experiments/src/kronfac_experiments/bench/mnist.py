"""`kronfac bench mnist`: examples that K-FAC's defaults need to the error of the authors' iteration 200.

The nightly test runs it (`tests/experiments/test_bench.py`). A run that `kronfac train mnist --until-error
4.352 --iterations 300 --seed S` has made in the same folder counts, and is not repeated.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.console import Console

from kronfac_experiments.bench import BenchOptions, publish
from kronfac_experiments.bench.authors_run import AUTHORS_CASES, AUTHORS_ERROR
from kronfac_experiments.config import Limits, TrainConfig
from kronfac_experiments.error_curve import ErrorCurve
from kronfac_experiments.optimizers import TrainingFailedError
from kronfac_experiments.options import at_least
from kronfac_experiments.pages.document import Table
from kronfac_experiments.suite import Member, run_suite

PROBLEM = "mnist"
ERROR = AUTHORS_ERROR[200]
MOST_ITERATIONS = 300
MOST_EXAMPLES = 100_000
"""That the median of the seeds may take."""


@dataclass(frozen=True)
class MnistConfig(BenchOptions):
    """Examples to the authors' error on the MNIST autoencoder, by defaults; fails if they are too many."""

    seeds: tuple[int, ...] = (0, 1, 2, 3, 4, 99)
    """Of initial parameters, mini-batches and sampled targets."""
    runs: Path = Path("runs")
    """Folder of the runs; what is there is not repeated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, seeds=self.seeds)


def mnist_command(config: MnistConfig) -> list[Path]:
    """Run what has not run, show it and compare the median with the threshold.

    Raises:
        TrainingFailedError: the median is above it.
    """
    console = Console(highlight=False, soft_wrap=True)
    limits = Limits(iterations=MOST_ITERATIONS, until_error=ERROR)
    members = [
        Member(
            f"seed {seed}",
            TrainConfig(
                PROBLEM,
                limits=limits,
                seed=seed,
                threads=config.threads,
                run_dir=config.runs / f"{PROBLEM}-kfac-seed{seed}",
            ),
        )
        for seed in config.seeds
    ]
    examples = [examples_to_error(curve) for curve in run_suite(members, console)]
    rows = [(str(seed), _count(count)) for seed, count in zip(config.seeds, examples, strict=True)]
    rows.append(("median", _count(median(examples))))
    note = f"At most {MOST_EXAMPLES:,} are allowed; the authors' run took {AUTHORS_CASES:,}."
    written = publish(
        "mnist",
        "Examples to the authors' error on MNIST, by defaults",
        config,
        ["MNIST autoencoder, KFAC(model, loss)"],
        [Table(f"Examples to error {ERROR}", ("seed", "examples"), rows, note)],
    )
    if median(examples) > MOST_EXAMPLES:
        found = _count(median(examples))
        raise TrainingFailedError(
            f"The median, {found}, is above the threshold of {MOST_EXAMPLES:,}."
        )
    return written


def examples_to_error(curve: ErrorCurve) -> float:
    """Examples until the evaluation at which the error was reached; ∞ if it was not."""
    return curve.end("cases") if curve.last <= ERROR else math.inf


def _count(examples: float) -> str:
    return f"{examples:,.0f}" if math.isfinite(examples) else "not reached"
