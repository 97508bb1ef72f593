"""`kronfac bench mnist-comparison`: the MNIST autoencoder in equal time, K-FAC and tuned others.

K-FAC with both inverses has `--preset paper` and nothing chosen; the learning rates of Nesterov momentum
and AdamW come from `kronfac tune`. Every run is a folder of `kronfac train`, seeds outermost so that a
slow hour of the machine hits all methods; what has run is not run again, and a stopped comparison goes on.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from kronfac_experiments.config import (
    FirstOrderOptions,
    KfacOptions,
    Limits,
    Recording,
    TrainConfig,
)
from kronfac_experiments.error_curve import Axis, ErrorCurve, progress_ratio
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.csv_files import write_csv
from kronfac_experiments.pages.document import Document, Picture, Table, described, spread
from kronfac_experiments.pages.drawn import BLUE, GREEN, SKY, VERMILION, png
from kronfac_experiments.pages.publish import publish
from kronfac_experiments.report.runs import Run
from kronfac_experiments.suite import Member, run_suite

SECONDS = (30.0, 60.0, 120.0, 300.0)
ITERATIONS = (50, 100, 150, 200)
CASES = (100_000, 200_000, 500_000, 1_000_000)
ERRORS = (40.0, 20.0, 10.0, 5.0, 4.0, 3.0, 2.5)
"""For progress an iteration of the two inverses."""
TRIDIAGONAL, DIAGONAL = "K-FAC, block-tridiagonal", "K-FAC, block-diagonal"
NAG, ADAMW = "Nesterov momentum", "AdamW"
STYLES = {
    TRIDIAGONAL: (BLUE, "-"),
    DIAGONAL: (SKY, "--"),
    NAG: (VERMILION, "-."),
    ADAMW: (GREEN, ":"),
}
DPI = 130


@dataclass(frozen=True)
class MnistComparisonConfig(BenchOptions):
    """K-FAC beside tuned Nesterov momentum and tuned AdamW on the MNIST autoencoder, in equal time."""

    nag_lr: float = 0.01
    """Learning rate of Nesterov momentum, from kronfac tune mnist --optimizer nag."""
    nag_mu_max: float = 0.99
    """Ceiling of its momentum, from there, too."""
    adamw_lr: float = 1e-3
    """Learning rate of AdamW, from kronfac tune mnist --optimizer adamw."""
    seeds: int = 3
    """How many, from --seed on."""
    seconds: float = 300.0
    """Seconds of optimiser time, each run."""
    evaluation_cases: int = 10_000
    """Training cases that the error is measured on, the first ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, seeds=self.seeds, evaluation_cases=self.evaluation_cases)
        self.members  # noqa: B018 - making them checks the rest

    @property
    def chosen_seeds(self) -> range:
        """The seeds."""
        return range(self.seed, self.seed + self.seeds)

    @property
    def runs(self) -> Path:
        """The folder of all runs."""
        return self.folder("mnist-comparison")

    @property
    def members(self) -> list[Member]:
        """Every method from every seed's start."""
        nag = FirstOrderOptions(self.nag_lr, self.nag_mu_max)
        tridiagonal = KfacOptions(inverse="block_tridiagonal", preset="paper")
        methods = {
            TRIDIAGONAL: ("kfac", tridiagonal, FirstOrderOptions()),
            DIAGONAL: ("kfac", KfacOptions(preset="paper"), FirstOrderOptions()),
            NAG: ("nag", KfacOptions(), nag),
            ADAMW: ("adamw", KfacOptions(), FirstOrderOptions(self.adamw_lr)),
        }
        return [
            Member(
                f"{label}, seed {seed}",
                TrainConfig(
                    problem="mnist",
                    optimizer=optimizer,
                    kfac=kfac,
                    first_order=first_order,
                    limits=Limits(seconds=self.seconds),
                    recording=Recording(
                        evaluate_at=SECONDS,
                        evaluate_every=10 if optimizer == "kfac" else 200,
                        evaluation_cases=self.evaluation_cases,
                        tensorboard=False,
                    ),
                    seed=seed,
                    threads=self.threads,
                    run_dir=self.runs / f"{label.replace(', ', '-').replace(' ', '-')}-{seed}",
                ),
            )
            for seed in self.chosen_seeds
            for label, (optimizer, kfac, first_order) in methods.items()
        ]


@dataclass(frozen=True)
class Point:
    """An evaluation, as a row of the table of the curves."""

    method: str
    seed: int
    iteration: int
    cases: int
    seconds: str
    error: str


Methods = dict[str, list[Run]]
"""Runs by method, in the order of the seeds."""


def mnist_comparison_command(config: MnistComparisonConfig) -> list[Path]:
    """Run what has not run; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    runs = run_suite(config.members, console)
    # Seeds are outermost: every so many runs it is the same method again.
    methods = {label: runs[i :: len(STYLES)] for i, label in enumerate(STYLES)}
    evaluations = _points(config, methods)
    measurements = write_csv(evaluations, config.runs / "mnist_comparison.csv")
    written = publish(_document(config, methods), measurements, config.output, console)
    if config.output is not None:
        written.append(write_csv(evaluations, config.output.with_suffix(".csv")))
    return written


def _points(config: MnistComparisonConfig, methods: Methods) -> list[Point]:
    """Every evaluation."""
    return [
        Point(label, seed, int(k), int(cases), f"{seconds:.3f}", f"{error:.5g}")
        for label, runs in methods.items()
        for seed, run in zip(config.chosen_seeds, runs, strict=True)
        for curve in [ErrorCurve.of(run)]
        for k, cases, seconds, error in zip(
            curve.iteration, curve.cases, curve.seconds, curve.error, strict=True
        )
    ]


def _document(config: MnistComparisonConfig, methods: Methods) -> Document:
    seeds = ", ".join(map(str, config.chosen_seeds))
    return Document(
        title="MNIST in equal time",
        command=command_line("bench mnist-comparison", config),
        settings=described(
            config.threads,
            config.seed,
            "MNIST autoencoder 784-1000-500-250-30 and back, η = 1e-5",
            f"seeds {seeds}, in each of which all methods start from the same parameters",
            "K-FAC: --preset paper (λ₀ = 150, τ₁ = 1/8, τ₂ = 1/4, mini-batches growing from 1000), nothing "
            "chosen",
            f"{NAG}: ε = {config.nag_lr:g}, μ_max = {config.nag_mu_max:g}, mini-batches of 500",
            f"{ADAMW}: ε = {config.adamw_lr:g}, mini-batches of 500, not averaged",
            "training error: squared reconstruction error a case on the first "
            f"{config.evaluation_cases:,} training cases, the smaller one of current and averaged "
            "parameters, median (smallest – largest) of the seeds",
            f"seconds of optimiser time without evaluation on {os.cpu_count()} shared cores",
        ),
        tables=tables(methods),
        picture=_picture(
            methods,
            f"MNIST autoencoder, same start, {config.threads} threads, seeds {seeds}; K-FAC --preset "
            "paper, the others tuned",
        ),
    )


def tables(methods: Methods) -> list[Table]:
    """Errors at equal seconds, iterations and cases; how far each got; the two inverses."""
    return [
        _errors_at(methods, "seconds", SECONDS, "s"),
        _errors_at(methods, "iteration", ITERATIONS, "iterations"),
        _errors_at(methods, "cases", CASES, "cases"),
        _reached(methods),
        _progress_an_iteration(methods),
    ]


def _cell(values: Sequence[float | None], digits: int = 3) -> str:
    """Median (smallest – largest), or how many have none."""
    there = [value for value in values if value is not None]
    if not values:
        return "diverged"
    if len(there) < len(values):
        return "not reached" if not there else f"reached by {len(there)} of {len(values)}"
    return spread(there, lambda value: f"{value:.{digits}g}")


def _errors_at(methods: Methods, axis: Axis, marks: Sequence[float], unit: str) -> Table:
    """Between evaluations log(error) is a straight line."""
    rows = [
        [label, *(_cell([ErrorCurve.of(run).at(axis, mark) for run in runs]) for mark in marks)]
        for label, runs in methods.items()
    ]
    name = "iterations" if axis == "iteration" else axis
    return Table(f"At equal {name}", ["", *(f"{mark:,.0f} {unit}" for mark in marks)], rows)


def _reached(methods: Methods) -> Table:
    rows = []
    for label, runs in methods.items():
        last = [run.rows[-1] for run in runs if not run.diverged]
        rows.append(
            [
                label,
                _cell([end["iteration"] for end in last], 6),
                _cell([end["cases"] for end in last], 8),
                _cell([1000 * end["seconds"] / end["iteration"] for end in last]),
                _cell([end["test_error"] for end in last]),
            ]
        )
    columns = ["", "iterations", "cases", "ms an iteration", "test error at the end"]
    return Table("How far each got", columns, rows)


def _progress_an_iteration(methods: Methods) -> Table:
    """Iterations to fixed errors, block-diagonal over block-tridiagonal."""
    diagonal, tridiagonal = (
        [ErrorCurve.of(run) for run in methods[label]] for label in (DIAGONAL, TRIDIAGONAL)
    )
    pairs = list(zip(tridiagonal, diagonal, strict=True))
    rows = [
        [
            f"{error:g}",
            *(_cell([c.reaches("iteration", error) for c in cs]) for cs in (diagonal, tridiagonal)),
            *(
                _cell([progress_ratio(*pair, "iteration", error, first) for pair in pairs])
                for first in (math.inf, 2 * error)
            ),
        ]
        for error in ERRORS
    ]
    return Table(
        "Progress an iteration of the two inverses",
        [
            "error",
            "iterations, block-diagonal",
            "block-tridiagonal",
            "ratio",
            "from twice the error",
        ],
        rows,
        "Iterations to an error, and their ratio seed by seed: from the start, and of the iterations in "
        "which the error halves. The paper reads 1.25 to 1.4 off its figure 11.",
    )


def _picture(methods: Methods, title: str) -> Picture:
    """Error against seconds, iterations and cases, a thin line a seed."""
    figure = Figure(figsize=(13, 4.6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(1, 3, sharey=True)
    names: dict[Axis, str] = {
        "seconds": "seconds",
        "iteration": "iterations",
        "cases": "training cases",
    }
    for ax, (axis, name) in zip(axes, names.items(), strict=True):
        for label, runs in methods.items():
            colour, line = STYLES[label]
            for index, run in enumerate(runs):
                curve = ErrorCurve.of(run)
                shown = None if index else label
                x = curve.along(axis)
                ax.plot(x, curve.error, line, color=colour, linewidth=1.4, label=shown)
        ax.set_yscale("log")
        if axis != "seconds":
            ax.set_xscale("log")
            ax.set_xlim(10 if axis == "iteration" else 5000, None)
        ax.set_xlabel(name)
        ax.grid(True, which="both", alpha=0.2)
    axes[0].set_ylabel("training error, squared, a case")
    axes[0].legend(fontsize=9)
    words = "Training error against seconds, iterations and cases"
    return Picture("The curves", words, png(figure, DPI))
