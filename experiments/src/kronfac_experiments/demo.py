"""`kronfac demo`: a deep autoencoder on CURVES, K-FAC beside Nesterov momentum and AdamW.

The same network, the same start, the same mini-batches of 500 and the same number of seconds for each;
evaluation is not counted. K-FAC is as it comes, the others have learning rates chosen for this problem.
Three runs as `kronfac train` makes them, then the report and a verdict.
"""

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from kronfac_experiments.config import (
    FirstOrderOptions,
    Limits,
    Recording,
    TrainConfig,
)
from kronfac_experiments.error_curve import ErrorCurve
from kronfac_experiments.report import ReportConfig, write_report
from kronfac_experiments.report.runs import Run
from kronfac_experiments.suite import Member, run_suite
from kronfac_experiments.train import TrainingInterruptedError

EVALUATIONS = 18
"""Evaluations of each run, at equal distances in time."""
EVALUATION_CASES = 2000
ADAMW = FirstOrderOptions(lr=3e-3)
"""The best of 3e-4, 1e-3 and 3e-3 for Adam on this problem in 25 seconds; not tuned for more."""
NESTEROV = FirstOrderOptions(lr=0.03, mu_max=0.99)
"""The best of 0.003, 0.01 and 0.03 with mini-batches of 250 for 30 seconds; the demo has 500."""


@dataclass(frozen=True)
class DemoConfig:
    """Train a deep autoencoder on generated CURVES images with three optimizers, for equal time.

    Ends in a page with all curves and a verdict. Nothing is downloaded.
    """

    seconds: float = 38.0
    """Optimiser time for each of the three; evaluation is not counted."""
    batch: int = 500
    """Cases in a mini-batch."""
    seed: int = 0
    """Seed of the initial parameters and the mini-batches."""
    threads: int = 2
    """CPU threads."""
    output: Path = Path("runs/demo")
    """Folder for the runs and the page; if it is there already, the first free one of -2, -3, …."""

    def __post_init__(self) -> None:
        for name, value in (("seconds", self.seconds), ("batch", self.batch)):
            if not 0 < value < float("inf"):
                raise ValueError(f"--{name} is positive and finite; got {value}.")
        if self.threads < 1:
            raise ValueError(f"--threads is 1 or more; got {self.threads}.")


def members(config: DemoConfig, folder: Path, source: TrainConfig) -> list[Member]:
    """The three runs; `source` names the problem."""

    def run(
        name: str, optimizer: str = "kfac", first_order: FirstOrderOptions | None = None
    ) -> TrainConfig:
        return replace(
            source,
            optimizer=optimizer,
            first_order=first_order or FirstOrderOptions(),
            batch=config.batch,
            average=0,
            limits=Limits(seconds=config.seconds),
            recording=Recording(
                evaluate_every=0,
                evaluate_at=tuple(config.seconds * k / EVALUATIONS for k in range(1, EVALUATIONS)),
                evaluation_cases=EVALUATION_CASES,
            ),
            seed=config.seed,
            threads=config.threads,
            run_dir=folder / name,
        )

    return [
        Member("K-FAC", run("kfac")),
        Member("Nesterov momentum", run("nesterov", "nag", NESTEROV)),
        Member("AdamW", run("adamw", "adamw", ADAMW)),
    ]


def verdict(labels: list[str], runs: list[Run]) -> list[str]:
    """What the numbers say, in three lines; the first run is K-FAC's."""
    curves = [ErrorCurve.of(run) for run in runs]
    finals = [curve.last for curve in curves]
    ends = ["diverged" if final == math.inf else f"ended at {final:.2f}" for final in finals]
    best = min(range(1, len(runs)), key=lambda i: finals[i])
    told = [f"{label} {end}" for label, end in zip(labels, ends, strict=True)]
    lines = [f"Training error after equal time: {', '.join(told)}."]
    reached = curves[0].reaches("seconds", finals[best])
    if reached is not None and finals[0] < finals[best] < math.inf:
        lines.append(
            f"{labels[0]} is {finals[best] / finals[0]:.1f} times lower than {labels[best]}, whose final "
            f"error it had passed after {reached:.0f} of {curves[best].end('seconds'):.0f} seconds."
        )
    elif finals[0] < finals[best]:
        lines.append(
            f"{labels[0]} alone did not diverge: not what we expect; please tell us about it."
        )
    else:
        lines.append(
            f"{labels[best]} is ahead, by a factor of {finals[0] / finals[best]:.1f}: not what we "
            "expect; please tell us about it."
        )
    steps = [int(curve.end("iteration")) for curve in curves]
    lines.append(f"{labels[0]} took {steps[0]:,} steps, {labels[best]} {steps[best]:,}.")
    return lines


def demo_command(config: DemoConfig, source: TrainConfig | None = None) -> Path:
    """Train, write the page, say who won.

    Args:
        config: What to run.
        source: The problem, if it is not CURVES.
    """
    console = Console(highlight=False, soft_wrap=True)
    folder = _free(config.output)
    suite = members(config, folder, source or TrainConfig(problem="curves"))
    console.print(
        f"Three optimizers, {config.seconds:g} s of training each, from the same start, mini-batches "
        f"of {config.batch}, {config.threads} thread(s), seed {config.seed}."
    )
    try:
        runs = run_suite(suite, console)
    except TrainingInterruptedError as error:
        message = f"Stopped; what was trained is in {folder}. The next demo starts anew."
        raise TrainingInterruptedError(message, error.exit_code - 128) from error
    page = folder / "report.html"
    write_report(ReportConfig(tuple(member.config.folder for member in suite), page))
    console.print()
    for line in verdict([member.label for member in suite], runs):
        console.print(line)
    return page


def _free(folder: Path) -> Path:
    """The folder, or the first of folder-2, folder-3, … that is not there."""
    names = itertools.chain([folder], (Path(f"{folder}-{k}") for k in itertools.count(2)))
    return next(path for path in names if not path.exists())
