"""`kronfac demo`: a deep autoencoder on CURVES, kronfac's optimizers beside Nesterov momentum and AdamW.

A race of one seed: the same network, start, mini-batches of 500 and seconds for each; evaluation is not
counted. kronfac's optimizers are as they come, the others have learning rates chosen for this problem.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from kronfac_experiments.options import at_least, require
from kronfac_experiments.pages.document import Document
from kronfac_experiments.race import tables
from kronfac_experiments.race.command import lanes_of, race
from kronfac_experiments.race.contestants import CONTESTANTS
from kronfac_experiments.race.pictures import draw
from kronfac_experiments.race.plan import Lane, Terms, score
from kronfac_experiments.race.problem import Problem
from kronfac_experiments.race.problems import PROBLEMS
from kronfac_experiments.race.records import SECONDS, TRAINING

EVALUATED = 2000
BATCH = 500
CHOSEN = (
    CONTESTANTS["kfac"],
    CONTESTANTS["ours-untuned"],
    replace(CONTESTANTS["nag"], grid={"lr": (0.03,)}, in_units=False),
    replace(CONTESTANTS["adamw"], grid={"lr": (3e-3,)}),
)
"""Rates are the best of 0.003, 0.01 and 0.03 for Nesterov momentum and of 3e-4, 1e-3 and 3e-3 for Adam,
held constant for half a minute."""


@dataclass(frozen=True)
class DemoConfig:
    """Train a deep autoencoder on generated CURVES images with four optimizers, for equal time.

    Ends in a page with all curves and a verdict. Nothing is downloaded.
    """

    seconds: float = 28.0
    """Optimizer time for each of the four; evaluation is not counted."""
    seed: int = 0
    """Seed of the initial parameters and the mini-batches."""
    threads: int = 2
    """CPU threads."""
    output: Path = Path("runs/demo")
    """Folder for the runs and the page; runs that are there already are not repeated."""

    def __post_init__(self) -> None:
        require(0 < self.seconds < float("inf"), "seconds", "positive and finite", self.seconds)
        at_least(1, threads=self.threads)
        at_least(0, seed=self.seed)


def demo_command(config: DemoConfig, problem: Problem | None = None) -> Path:
    """Train, write the page, say who won.

    Args:
        config: What to run.
        problem: The problem, if it is not CURVES.
    """
    console = Console(highlight=False, soft_wrap=True)
    curves = replace(PROBLEMS["curves"], batches=(BATCH,), evaluated=(EVALUATED, EVALUATED))
    problem = problem or curves
    terms = Terms(
        {"seconds": config.seconds}, seeds=1, first_seed=config.seed, schedule="linear",
        weight_decays=(0.0,), threads=config.threads, by_clock=True,
    )  # fmt: skip
    race([problem], CHOSEN, terms, config.output, console)
    lanes = lanes_of([problem], CHOSEN, terms, config.output)
    said = verdict(lanes[problem.name])
    document = Document(
        title="K-FAC, WhitenedMomentum, Nesterov momentum and AdamW",
        command=f"kronfac demo --seconds {config.seconds:g} --seed {config.seed}",
        settings=said,
        tables=[tables.scores(lanes), tables.contestants(lanes)],
        pictures=[draw(lanes, config.seconds)],
    )
    console.print(said)
    return document.write_html(config.output / "report.html")


def verdict(lanes: Sequence[Lane]) -> str:
    """What the numbers say."""
    runs = {lane.contestant.label: lane.runs[0] for lane in lanes}
    ends = {lane.contestant.label: score(lane.problem, lane.runs[0]) for lane in lanes}
    best, second = sorted(ends, key=lambda label: ends[label])[:2]
    errors = ", ".join(
        f"{label} {'failed' if runs[label].message else f'{end:#.3g}'}"
        for label, end in ends.items()
    )
    said = f"Training error after equal time: {errors}. "
    if runs[second].message:
        return (
            f"{said}{best} alone did not fail." if not runs[best].message else f"{said}All failed."
        )
    rows = np.array(runs[best].rows)
    passed = rows[rows[:, TRAINING] <= ends[second], SECONDS]
    return (
        f"{said}{best} is {ends[second] / ends[best]:.2f} times lower than {second}, whose final error it "
        f"had passed after {passed[0]:.0f} of {rows[-1, SECONDS]:.0f} seconds. It took "
        f"{rows[-1, 0]:,.0f} steps, {second} {runs[second].rows[-1][0]:,.0f}."
    )
