"""Figures 10 and 11: training error against time and iterations, four methods on three problems [MG15 §13].

The runs are trained once for both.

K-FAC has the paper's preset and its growing mini-batch; without momentum, and for the baseline, m is
fixed. The paper chose that m among a few by progress a second, and states it for the baseline alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from kronfac_experiments.config import Limits
from kronfac_experiments.error_curve import Axis, ErrorCurve, common_error, progress_ratio
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import Number, publish
from kronfac_experiments.figures.lines import (
    draw_curve,
    finish,
    leave_out_the_start,
    legend_below,
    zoom,
)
from kronfac_experiments.figures.methods import (
    BASELINE,
    DIAGONAL,
    EVALUATE_EVERY,
    METHODS,
    NO_MOMENTUM,
    TRIDIAGONAL,
    Measured,
    Method,
    baseline_options,
    measured_on,
    points_of,
)
from kronfac_experiments.suite import run_suite

NAME = "experiment-2"
NO_MOMENTUM_BATCH = 1000
"""m of K-FAC without momentum, not searched for: that of K-FAC's first mini-batch. By the paper its
progress is about linear in m, as the cost of a step is from there on."""
PAPER_PROGRESS = "paper: typically 1.25 to 1.4"
MARK: dict[Axis, str] = {"iteration": "iteration {:,.0f}", "seconds": "{:,.1f} seconds"}
EACH: dict[Axis, str] = {"iteration": "an iteration", "seconds": "a second"}
PAIRS = (
    (TRIDIAGONAL, DIAGONAL),
    (TRIDIAGONAL, BASELINE),
    (DIAGONAL, BASELINE),
    (NO_MOMENTUM, BASELINE),
)


@dataclass(frozen=True)
class Setting:
    """A problem, and how far its runs go."""

    problem: str
    lambda0: float
    """First λ of all K-FAC runs of the problem."""
    kfac: Limits
    """With momentum."""
    others: Limits
    """Without, and of the baseline."""
    evaluate_baseline_every: int
    evaluation_cases: int | None


QUICK_LAMBDA = 1.0
"""λ₀. With the paper's 150 MNIST is near the error of the mean image until iteration 50 and more
(docs/results/paper_figures.md), which is a good part of what the quick setting has time for."""
QUICK_SECONDS = 30.0
QUICK = tuple(
    Setting(
        name, QUICK_LAMBDA, Limits(seconds=QUICK_SECONDS), Limits(seconds=QUICK_SECONDS), 200, 5000
    )
    for name in ("curves", "mnist", "faces")
)
# By then the mini-batch is the whole training set; the others get about the seconds that this takes on
# two cores.
FULL = tuple(
    Setting(name, 150.0, Limits(iterations=500), Limits(seconds=seconds), 1000, None)
    for name, seconds in (("curves", 450.0), ("mnist", 1800.0), ("faces", 7200.0))
)


@dataclass(frozen=True)
class Result:
    """A problem's curves, in the order of `METHODS`."""

    setting: Setting
    curves: dict[Method, ErrorCurve]

    @property
    def title(self) -> str:
        """What differs from problem to problem."""
        return (
            f"{self.setting.problem.upper()}: λ₀ = {self.setting.lambda0:g}; baseline with "
            f"{baseline_options(self.setting.problem)}"
        )


def run(config: FigureConfig) -> list[Result]:
    """Train what has not been trained, and read the curves of all."""
    settings = QUICK if config.quick else FULL
    members = [
        _measured(config, setting, method).member(config, NAME)
        for setting in settings
        for method in METHODS
    ]
    curves = iter(run_suite(members, Console(highlight=False, soft_wrap=True)))
    return [Result(setting, {method: next(curves) for method in METHODS}) for setting in settings]


def _measured(config: FigureConfig, setting: Setting, method: Method) -> Measured:
    grows = method in (TRIDIAGONAL, DIAGONAL)
    batch: int | Literal["paper"] | None = "paper" if grows else NO_MOMENTUM_BATCH
    return Measured(
        problem=setting.problem,
        method=method,
        batch=None if method is BASELINE else batch,
        lambda0=setting.lambda0,
        limits=setting.kfac if grows else setting.others,
        evaluate_every=(setting.evaluate_baseline_every if method is BASELINE else EVALUATE_EVERY),
        evaluation_cases=config.cases or setting.evaluation_cases,
    )


def describe(config: FigureConfig, results: Sequence[Result]) -> str:
    """The setting that all problems share, for titles."""
    cases = config.cases or results[0].setting.evaluation_cases
    return (
        "K-FAC with the paper's preset and growing mini-batch, without momentum m = "
        f"{NO_MOMENTUM_BATCH:,};\nbaseline m = 250 on CURVES, else 500; {measured_on(cases)}; "
        f"CPU threads: {config.threads}; seed {config.seed}"
    )


def numbers(result: Result, axis: Axis) -> list[Number]:
    """Errors at equal marks of the axis, and how many times the progress one method makes of another's.

    The marks are a quarter, a half and all of what the shortest run has that did not diverge. Progress
    is compared up to the lowest error that both reach; for the two inverses also over the last halving
    of the error.
    """
    problem = result.setting.problem.upper()
    curves = result.curves.values()
    shortest = min(curve.end(axis) for curve in curves if not curve.diverged)
    marks = [shortest / 4, shortest / 2, shortest]
    if axis == "iteration":
        marks = [float(round(mark)) for mark in marks]
    found = [
        Number(
            f"{problem}: error at {MARK[axis].format(mark)}, {method.name}", curve.at(axis, mark)
        )
        for mark in marks
        for method, curve in result.curves.items()
    ]
    for one, other in PAIRS:
        fast, slow = result.curves[one], result.curves[other]
        last = common_error(fast, slow)
        label = f"{problem}: progress {EACH[axis]}, {one.name} / {other.name}"
        ratio = progress_ratio(fast, slow, axis, last)
        found.append(Number(f"{label}, start to error {last:.3g}", ratio))
        if other is DIAGONAL:
            late = progress_ratio(fast, slow, axis, last, 2 * last)
            note = f" ({PAPER_PROGRESS})" if axis == "iteration" else ""
            found.append(Number(f"{label}, error {2 * last:.3g} to {last:.3g}{note}", late))
    return found


def figure_10(config: FigureConfig) -> list[Path]:
    """Against time, a row a problem."""
    results = run(config)
    title = f"Figure 10: training error against time\n{describe(config, results)}"
    figure = Figure(figsize=(8.5, 1.4 + 3.1 * len(results)), layout="constrained")
    rows = figure.subplots(len(results), squeeze=False)[:, 0]
    for axes, result in zip(rows, results, strict=True):
        _panel(axes, result, "seconds", result.title)
    return _labelled(config, figure, results, "seconds", title, columns=2)


def figure_11(config: FigureConfig) -> list[Path]:
    """Against iterations, a row a problem: all of them, and as many as K-FAC with momentum takes."""
    results = run(config)
    title = f"Figure 11: training error against iterations\n{describe(config, results)}"
    figure = Figure(figsize=(11.5, 1.4 + 3.1 * len(results)), layout="constrained")
    rows = figure.subplots(len(results), 2, squeeze=False)
    for (whole, part), result in zip(rows, results, strict=True):
        _panel(whole, result, "iteration", result.title)
        _panel(part, result, "iteration", f"{result.setting.problem.upper()}: K-FAC's iterations")
        end = max(result.curves[method].end("iteration") for method in (TRIDIAGONAL, DIAGONAL))
        zoom(part, result.curves.values(), "iteration", end)
        leave_out_the_start(part, result.curves.values())
    return _labelled(config, figure, results, "iteration", title, columns=4)


def _panel(axes: Axes, result: Result, axis: Axis, title: str) -> None:
    for method, curve in result.curves.items():
        draw_curve(axes, curve, axis, method.style)
    finish(axes, axis, title)
    leave_out_the_start(axes, result.curves.values())


def _labelled(
    config: FigureConfig,
    figure: Figure,
    results: Sequence[Result],
    axis: Axis,
    title: str,
    columns: int,
) -> list[Path]:
    """Write the figure with its numbers and curves, and say what it shows."""
    figure.suptitle(title, fontsize=10.5)
    legend_below(figure, {method.name: method.style for method in METHODS}, columns)
    found = [n for result in results for n in numbers(result, axis)]
    points = [
        point
        for result in results
        for method, curve in result.curves.items()
        for point in points_of(curve, result.setting.problem, method)
    ]
    return publish(config, figure, title, found, found, points)
