"""The MNIST autoencoder in equal time: K-FAC with both inverses, tuned Nesterov momentum, tuned AdamW.

K-FAC has `--preset paper` and nothing chosen; the learning rates of the others come from `kronfac
tune`. Every run is a folder of `kronfac train`, seeds outermost so that a slow hour of the machine hits
all methods; what has run is not run again, and a stopped comparison goes on.

    python benchmarks/mnist_comparison.py --output docs/results/mnist_comparison.md
"""

import csv
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
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
from kronfac_experiments.report.runs import Run
from kronfac_experiments.suite import Member, run_suite

SECONDS = (30.0, 60.0, 120.0, 300.0)
ITERATIONS = (50, 100, 150, 200)
CASES = (100_000, 200_000, 500_000, 1_000_000)
ERRORS = (40.0, 20.0, 10.0, 5.0, 4.0, 3.0, 2.5)
"""For progress an iteration of the two inverses."""
STYLES = {
    "K-FAC, block-tridiagonal": ("#0072B2", "-"),
    "K-FAC, block-diagonal": ("#56B4E9", "--"),
    "Nesterov momentum": ("#D55E00", "-."),
    "AdamW": ("#009E73", ":"),
}


@dataclass(frozen=True)
class Settings:
    """K-FAC beside the tuned baseline and tuned AdamW on MNIST, in equal optimiser time."""

    nag_lr: float = 0.01
    """Learning rate of Nesterov momentum, from `kronfac tune mnist --optimizer nag`."""
    nag_mu_max: float = 0.99
    adamw_lr: float = 1e-3
    """From `kronfac tune mnist --optimizer adamw`."""
    seeds: tuple[int, ...] = (0, 1, 2)
    seconds: float = 300.0
    """Of optimiser time, each run."""
    evaluation_cases: int = 10_000
    """Training cases that the error is measured on, the first ones."""
    threads: int = 2
    runs: Path = Path("runs/mnist_comparison")
    output: Path | None = None
    """Markdown file to write; numbers and a picture go beside it."""


def members(settings: Settings) -> list[Member]:
    """Every method from every seed's start."""
    nag = FirstOrderOptions(settings.nag_lr, settings.nag_mu_max)
    tridiagonal = KfacOptions(inverse="block_tridiagonal", preset="paper")
    methods = dict(
        zip(
            STYLES,
            (
                ("kfac", tridiagonal, FirstOrderOptions()),
                ("kfac", KfacOptions(preset="paper"), FirstOrderOptions()),
                ("nag", KfacOptions(), nag),
                ("adamw", KfacOptions(), FirstOrderOptions(settings.adamw_lr)),
            ),
            strict=True,
        )
    )
    return [
        Member(
            f"{label}, seed {seed}",
            TrainConfig(
                problem="mnist",
                optimizer=optimizer,
                kfac=kfac,
                first_order=first_order,
                limits=Limits(seconds=settings.seconds),
                recording=Recording(
                    evaluate_at=SECONDS,
                    evaluate_every=10 if optimizer == "kfac" else 200,
                    evaluation_cases=settings.evaluation_cases,
                    tensorboard=False,
                ),
                seed=seed,
                threads=settings.threads,
                run_dir=settings.runs / f"{label.replace(', ', '-').replace(' ', '-')}-{seed}",
            ),
        )
        for seed in settings.seeds
        for label, (optimizer, kfac, first_order) in methods.items()
    ]


Methods = dict[str, list[Run]]
"""Runs by method, in the order of the seeds."""


def cell(values: Sequence[float | None], digits: int = 3) -> str:
    """Median (least – most), and how many have none."""
    there = [value for value in values if value is not None]
    if not values:
        return "diverged"
    if len(there) < len(values):
        return "not reached" if not there else f"reached by {len(there)} of {len(values)}"
    low, high = min(there), max(there)
    return f"{statistics.median(there):.{digits}g} ({low:.{digits}g} – {high:.{digits}g})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table."""
    return [
        f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)
    ]  # fmt: skip


def errors_at(methods: Methods, axis: Axis, marks: Sequence[float], unit: str) -> list[str]:
    """A table of errors; between evaluations log(error) is a straight line."""
    head = ["", *(f"{mark:,.0f} {unit}" for mark in marks)]
    rows = [
        [label, *(cell([ErrorCurve.of(run).at(axis, mark) for run in runs]) for mark in marks)]
        for label, runs in methods.items()
    ]
    return markdown(head, rows)


def progress_an_iteration(methods: Methods) -> list[str]:
    """Iterations to fixed errors, block-diagonal over block-tridiagonal."""
    diagonal, tridiagonal = (
        [ErrorCurve.of(run) for run in methods[f"K-FAC, block-{kind}"]]
        for kind in ("diagonal", "tridiagonal")
    )
    pairs = list(zip(tridiagonal, diagonal, strict=True))
    rows = [
        [
            f"{error:g}",
            *(cell([c.reaches("iteration", error) for c in cs]) for cs in (diagonal, tridiagonal)),
            *(
                cell([progress_ratio(*pair, "iteration", error, first) for pair in pairs])
                for first in (math.inf, 2 * error)
            ),
        ]
        for error in ERRORS
    ]
    head = (
        "error",
        "iterations, block-diagonal",
        "block-tridiagonal",
        "ratio",
        "from twice the error",
    )
    return markdown(head, rows)


def speed(methods: Methods) -> list[str]:
    """How far each got."""
    rows = []
    for label, runs in methods.items():
        last = [run.rows[-1] for run in runs if not run.diverged]
        row = [label]
        for name, digits in (("iteration", 6), ("cases", 8)):
            row.append(cell([end[name] for end in last], digits))
        row.append(cell([1000 * end["seconds"] / end["iteration"] for end in last]))
        row.append(cell([end["test_error"] for end in last]))
        rows.append(row)
    return markdown(["", "iterations", "cases", "ms an iteration", "test error at the end"], rows)


def text(settings: Settings, methods: Methods) -> str:
    """The page."""
    command = (
        f"python benchmarks/mnist_comparison.py --nag-lr {settings.nag_lr:g} "
        f"--nag-mu-max {settings.nag_mu_max:g} --adamw-lr {settings.adamw_lr:g} "
        f"--seeds {' '.join(map(str, settings.seeds))} --seconds {settings.seconds:g} "
        f"--evaluation-cases {settings.evaluation_cases} --threads {settings.threads}"
    )
    lines = [
        "# MNIST in equal time",
        "",
        f"Made by `{command} --output docs/results/mnist_comparison.md`.",
        "",
        "MNIST autoencoder 784-1000-500-250-30 and back, η = 1e-5, float32, "
        f"{settings.threads} threads on {os.cpu_count()} shared cores, torch {torch.__version__}, seeds "
        f"{', '.join(map(str, settings.seeds))}; in each seed all methods start from the same "
        "parameters. K-FAC: `--preset paper` (λ₀ = 150, τ₁ = 1/8, τ₂ = 1/4, mini-batches growing from "
        f"1000), nothing chosen. Nesterov momentum: ε = {settings.nag_lr:g}, μ_max = "
        f"{settings.nag_mu_max:g}, mini-batches of 500. AdamW: ε = {settings.adamw_lr:g}, mini-batches "
        "of 500. Training error: squared reconstruction error a case on the first "
        f"{settings.evaluation_cases:,} training cases, the smaller one of current and averaged "
        "parameters (AdamW is not averaged). Median (least – most) of the seeds. Seconds are "
        "optimiser time, evaluation excluded.",
        "",
        "![Training error against seconds, iterations and cases](mnist_comparison.png)",
        "",
        "## At equal seconds",
        "",
        *errors_at(methods, "seconds", SECONDS, "s"),
        "",
        "## At equal iterations",
        "",
        *errors_at(methods, "iteration", ITERATIONS, "iterations"),
        "",
        "## At equal cases",
        "",
        *errors_at(methods, "cases", CASES, "cases"),
        "",
        "## How far each got",
        "",
        *speed(methods),
        "",
        "## Progress an iteration of the two inverses",
        "",
        "Iterations to an error, and their ratio seed by seed: from the start, and of the iterations in "
        "which the error halves. The paper reads 1.25 to 1.4 off its figure 11.",
        "",
        *progress_an_iteration(methods),
        "",
    ]
    return "\n".join(lines)


def picture(methods: Methods, title: str) -> Figure:
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
                ax.plot(
                    curve.along(axis),
                    curve.error,
                    line,
                    color=colour,
                    linewidth=1.4,
                    label=None if index else label,
                )
        ax.set_yscale("log")
        if axis != "seconds":
            ax.set_xscale("log")
            ax.set_xlim(10 if axis == "iteration" else 5000, None)
        ax.set_xlabel(name)
        ax.grid(True, which="both", alpha=0.2)
    axes[0].set_ylabel("training error, squared, a case")
    axes[0].legend(fontsize=9)
    return figure


def write(path: Path, settings: Settings, methods: Methods) -> None:
    """The page, every evaluation as CSV, and the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text(settings, methods), encoding="utf-8")
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["method", "seed", "iteration", "cases", "seconds", "error"])
        for label, runs in methods.items():
            for seed, run in zip(settings.seeds, runs, strict=True):
                curve = ErrorCurve.of(run)
                columns = (curve.iteration, curve.cases, curve.seconds, curve.error)
                writer.writerows(
                    [label, seed, int(k), int(cases), f"{seconds:.3f}", f"{error:.5g}"]
                    for k, cases, seconds, error in zip(*columns, strict=True)
                )
    title = (
        f"MNIST autoencoder, same start, {settings.threads} threads, seeds "
        f"{', '.join(map(str, settings.seeds))}; K-FAC --preset paper, the others tuned"
    )
    picture(methods, title).savefig(path.with_suffix(".png"), dpi=130)


def main(settings: Settings) -> None:
    """Run, tell, write."""
    console = Console(highlight=False, soft_wrap=True)
    runs = run_suite(members(settings), console)
    # Seeds are outermost: every so many runs it is the same method again.
    methods = {label: runs[i :: len(STYLES)] for i, label in enumerate(STYLES)}
    console.print(text(settings, methods))
    if settings.output is not None:
        write(settings.output, settings, methods)
        console.print(f"Wrote {settings.output}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
