"""The four methods of [MG15 §13], as runs and as lines, for figures 9, 10 and 11."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kronfac_experiments.config import (
    FirstOrderOptions,
    KfacOptions,
    Limits,
    Recording,
    TrainConfig,
)
from kronfac_experiments.error_curve import ErrorCurve
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, VERMILION, Style
from kronfac_experiments.suite import Member

TUNED = {"curves": (0.03, 0.99), "mnist": (0.01, 0.99), "faces": (0.001, 0.99)}
"""The baseline's learning rate and μ_max for each problem, with mini-batches of 250 on CURVES and of 500
elsewhere: the best of a grid of seven."""

EVALUATE_EVERY = 10
"""Iterations of K-FAC between evaluations."""


@dataclass(frozen=True)
class Method:
    """K-FAC with an inverse, or the baseline."""

    name: str
    folder: str
    style: Style
    inverse: Literal["block_diagonal", "block_tridiagonal"] | None
    """None: the baseline."""
    momentum: bool = True


TRIDIAGONAL = Method(
    "block-tridiagonal K-FAC", "tridiagonal", Style(BLUE, "-", "o"), "block_tridiagonal"
)
DIAGONAL = Method("block-diagonal K-FAC", "diagonal", Style(GREEN, "--", "s"), "block_diagonal")
NO_MOMENTUM = Method(
    "block-diagonal K-FAC, no momentum",
    "no-momentum",
    Style(BLACK, ":", "^"),
    "block_diagonal",
    momentum=False,
)
BASELINE = Method("baseline (Nesterov)", "baseline", Style(VERMILION, "-.", "D"), None)
METHODS = (TRIDIAGONAL, DIAGONAL, NO_MOMENTUM, BASELINE)


@dataclass(frozen=True)
class Measured:
    """A method on a problem, and how its error is measured.

    Args:
        problem: curves, mnist or faces.
        method: One of `METHODS`.
        batch: Cases of a mini-batch, `paper` for the growing one, None for the baseline's own.
        lambda0: λ₀; the baseline has none.
        limits: When it stops.
        evaluate_every: Iterations.
        evaluation_cases: Training cases that the error is measured on; None for all.
    """

    problem: str
    method: Method
    batch: int | Literal["paper"] | None
    lambda0: float
    limits: Limits
    evaluate_every: int
    evaluation_cases: int | None

    def member(self, config: FigureConfig, experiment: str) -> Member:
        """The run. Its folder names what a developer may change, so that another value is another run."""
        method = self.method
        size = "" if self.batch is None else f"-m{self.batch}"
        kfac, first_order = KfacOptions(), FirstOrderOptions()
        if method.inverse is None:
            lr, mu_max = TUNED[self.problem]
            first_order = FirstOrderOptions(lr, mu_max)
            options = f"lr{lr:g}-mu{mu_max:g}"
        else:
            kfac = KfacOptions(method.inverse, "paper", self.lambda0, method.momentum)
            options = f"lambda{self.lambda0:g}"
        folder = f"{self.problem}-{method.folder}{size}-{options}"
        train = TrainConfig(
            problem=self.problem,
            optimizer="nag" if method.inverse is None else "kfac",
            batch=self.batch,
            limits=self.limits,
            kfac=kfac,
            first_order=first_order,
            seed=config.seed,
            run_dir=runs_folder(config, experiment, self.evaluation_cases) / folder,
            recording=Recording(
                evaluate_every=self.evaluate_every,
                evaluation_cases=self.evaluation_cases,
            ),
            threads=config.threads,
        )
        return Member(f"{self.problem.upper()}, {method.name}, {self._size}", train)

    @property
    def _size(self) -> str:
        sizes = {None: "its own m", "paper": "growing m"}
        return f"m = {self.batch:,}" if isinstance(self.batch, int) else sizes[self.batch]


def runs_folder(config: FigureConfig, experiment: str, evaluation_cases: int | None) -> Path:
    """The folder for the runs of an experiment: another setting, seed or measure is another folder."""
    setting = "quick" if config.quick else "full"
    measure = "" if evaluation_cases is None else f"-cases{evaluation_cases}"
    return (
        config.runs / f"{experiment}-{setting}{measure}-threads{config.threads}-seed{config.seed}"
    )


def baseline_options(problem: str) -> str:
    """In words, for titles."""
    lr, mu_max = TUNED[problem]
    return f"learning rate {lr:g}, μ_max = {mu_max:g}"


def measured_on(evaluation_cases: int | None) -> str:
    """In words, for titles."""
    which = "all" if evaluation_cases is None else f"the first {evaluation_cases:,}"
    return f"error on {which} training cases"


@dataclass(frozen=True)
class Point:
    """An evaluation, as a row of the table of the curves."""

    problem: str
    method: str
    m: int | None
    """None: the method's own."""
    iteration: int
    cases: int
    seconds: float
    error: float


def points_of(curve: ErrorCurve, problem: str, method: Method, m: int | None = None) -> list[Point]:
    """The evaluations of a run."""
    rows = zip(curve.iteration, curve.cases, curve.seconds, curve.error, strict=True)
    return [
        Point(problem, method.name, m, int(k), int(cases), float(seconds), float(error))
        for k, cases, seconds, error in rows
    ]
