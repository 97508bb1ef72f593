"""Figure 9: the mini-batch size and the progress an iteration and a case, on MNIST [MG15 §13].

The paper finds that the progress of K-FAC an iteration grows faster than m, provided it has momentum, and
the baseline's much more slowly. Lines of different m that lie together against cases are progress in
proportion to m; if larger m is lower, it is super-linear. Both axes are logarithmic, so that equal
ratios are equal distances early and late: this takes the place of the paper's two enlarged panels.

The text does not state the sizes m, nor how long the runs are. The baseline has at every m the learning
rate that was tuned at 500.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.figure import Figure
from rich.console import Console

from kronfac_experiments.config import Limits
from kronfac_experiments.error_curve import (
    Axis,
    ErrorCurve,
    batch_exponent,
    common_error,
    progress_ratio,
)
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import Number, publish
from kronfac_experiments.figures.lines import draw_curve, finish, legend_below
from kronfac_experiments.figures.methods import (
    BASELINE,
    EVALUATE_EVERY,
    METHODS,
    Measured,
    Method,
    baseline_options,
    measured_on,
    points_of,
)
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, VERMILION, Style
from kronfac_experiments.suite import run_suite

NAME = "experiment-1"
PROBLEM = "mnist"
STYLES = (
    Style(VERMILION, ":", "^"),
    Style(GREEN, "--", "s"),
    Style(BLUE, "-", "o"),
    Style(BLACK, "-.", "D"),
)
"""Styles of the sizes, from the smallest."""
EXPONENT = (
    "p: progress an iteration is proportional to mᵖ. Above 1 it is super-linear: the larger m needs "
    "fewer cases."
)
COLUMNS: tuple[Axis, ...] = ("iteration", "cases")


@dataclass(frozen=True)
class Size:
    """A mini-batch size, and how many iterations its runs have."""

    m: int
    kfac: int
    baseline: int


@dataclass(frozen=True)
class Setting:
    """What is run, and the errors for which the cases are counted."""

    lambda0: float
    sizes: tuple[Size, ...]
    """From the smallest, at most as many as there are `STYLES`."""
    evaluate_baseline_every: int
    evaluation_cases: int | None
    errors: tuple[float, ...]


# λ₀ = 1: with the paper's 150 the error is near that of the mean image until iteration 50 and more
# (docs/results/paper_figures.md). Iterations so that the runs of a method take about equally long, by
# docs/results/step_cost.md.
QUICK = Setting(
    lambda0=1.0,
    sizes=(Size(250, 160, 700), Size(1000, 80, 250), Size(4000, 40, 80)),
    evaluate_baseline_every=50,
    evaluation_cases=5000,
    errors=(40.0, 30.0, 20.0, 10.0),
)
FULL = Setting(
    lambda0=150.0,
    sizes=(Size(2000, 500, 2500), Size(4000, 500, 2500), Size(6000, 500, 2500)),
    evaluate_baseline_every=50,
    evaluation_cases=None,
    errors=(20.0, 10.0, 5.0, 3.0),
)


Curves = dict[Method, dict[int, ErrorCurve]]
"""By method and m."""


def make(config: FigureConfig) -> list[Path]:
    """A row a method: against iterations, and against cases."""
    setting = QUICK if config.quick else FULL
    curves = _run(config, setting)
    title = "Figure 9: the size of the mini-batch and the progress of an iteration and of a case"
    where = (
        f"MNIST autoencoder; K-FAC with the paper's preset, λ₀ = {setting.lambda0:g}; baseline with "
        f"{baseline_options(PROBLEM)}\n"
        f"{measured_on(config.cases or setting.evaluation_cases)}; CPU threads: {config.threads}; "
        f"seed {config.seed}"
    )
    numbers = exponents(curves) + cases_to_errors(curves, setting.errors)
    points = [
        point
        for method, by_size in curves.items()
        for m, curve in by_size.items()
        for point in points_of(curve, PROBLEM, method, m)
    ]
    figure = _draw(f"{title}\n{where}", curves)
    return publish(config, figure, f"{title}\n{where}\n{EXPONENT}", numbers, numbers, points)


def _run(config: FigureConfig, setting: Setting) -> Curves:
    members = [
        Measured(
            problem=PROBLEM,
            method=method,
            batch=size.m,
            lambda0=setting.lambda0,
            limits=Limits(iterations=size.baseline if method is BASELINE else size.kfac),
            evaluate_every=(
                setting.evaluate_baseline_every if method is BASELINE else EVALUATE_EVERY
            ),
            evaluation_cases=config.cases or setting.evaluation_cases,
        ).member(config, NAME)
        for method in METHODS
        for size in setting.sizes
    ]
    found = iter(run_suite(members, Console(highlight=False, soft_wrap=True)))
    return {method: {size.m: next(found) for size in setting.sizes} for method in METHODS}


def exponents(curves: Curves) -> list[Number]:
    """p of progress ∝ mᵖ, and what it means in cases, between neighbouring sizes of every method.

    From the start and over the last halving of the error that both reach: in the first iterations λ comes
    down from λ₀ at a pace that does not depend on m, and the finding is about the later stage.
    """
    numbers = []
    for method, by_size in curves.items():
        for (m, small), (m_large, large) in pairwise(by_size.items()):
            last = common_error(small, large)
            between = f"{method.name}, m = {m:,} to {m_large:,}"
            late = f"error {2 * last:.3g} to {last:.3g}"
            whole = batch_exponent(large, small, m_large / m, last)
            halving = batch_exponent(large, small, m_large / m, last, 2 * last)
            saved = progress_ratio(large, small, "cases", last, 2 * last)
            numbers += [
                Number(f"p, {between}, start to error {last:.3g}", whole),
                Number(f"p, {between}, {late}", halving),
                Number(f"cases of the smaller m / of the larger, {between}, {late}", saved),
            ]
    return numbers


def cases_to_errors(curves: Curves, errors: Sequence[float]) -> list[Number]:
    """Cases that each method and size needs to each error."""
    return [
        Number(f"cases to error {error:g}, {method.name}, m = {m:,}", curve.reaches("cases", error))
        for method, by_size in curves.items()
        for error in errors
        for m, curve in by_size.items()
    ]


def _draw(title: str, curves: Curves) -> Figure:
    figure = Figure(figsize=(11.0, 1.3 + 2.7 * len(curves)), layout="constrained")
    figure.suptitle(title, fontsize=10.5)
    # The same axes in every row, so that the methods can be compared.
    rows = figure.subplots(len(curves), 2, sharex="col", sharey=True)
    styles = {}
    for row, (method, by_size) in zip(rows, curves.items(), strict=True):
        for axes, axis in zip(row, COLUMNS, strict=True):
            for style, (m, curve) in zip(STYLES, by_size.items(), strict=False):
                draw_curve(axes, curve, axis, style)
                styles[f"m = {m:,}"] = style
            axes.set_xscale("log", nonpositive="mask")  # the evaluation before the first step
            finish(axes, axis, method.name)
    legend_below(figure, styles, columns=len(styles))
    return figure
