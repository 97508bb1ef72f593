"""Figure 7: the improvement of a step against γ, with and without re-scaling and momentum [MG15 §6.4].

The paper takes the MNIST autoencoder at iteration 500 of block-tridiagonal K-FAC, where a mini-batch is
the whole training set. That run goes through 7.2 million cases, about an hour on one core by the time
of its first steps; it is continued when the command is given again.

The quick setting is CURVES with mini-batches of 500, at iteration 250, with λ₀ = 10 in place of 150 so
that the network has by then left the plateau at the entropy of the mean image. It matters: on the
plateau (iteration 60, λ₀ = 1 or 150) the finding does not hold: at its best γ the raw Δ improves more
than the re-scaled step at its own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from kronfac import KFAC
from kronfac_experiments.config import KfacOptions, Limits, Recording, TrainConfig, resolved
from kronfac_experiments.diagnostics import Improvement, damping_sweep
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import Number, publish
from kronfac_experiments.optimizers import CHUNK
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, VERMILION
from kronfac_experiments.run_directory import CHECKPOINT
from kronfac_experiments.session import Session
from kronfac_experiments.suite import run_or_continue
from kronfac_experiments.task import Task, load_task


@dataclass(frozen=True)
class Setting:
    """The run before, and the γ to try."""

    problem: str
    iterations: int
    batch: int | Literal["paper"]
    """Cases of a mini-batch; `paper` grows to the whole training set in 500 iterations [MG15 §13]."""
    lambda_: float
    """λ₀."""
    lowest: float
    """γ."""
    highest: float
    points: int

    @property
    def gammas(self) -> list[float]:
        """Equal steps of log γ."""
        ratio = math.log(self.highest / self.lowest) / (self.points - 1)
        return [self.lowest * math.exp(k * ratio) for k in range(self.points)]


QUICK = Setting("curves", 250, 500, 10.0, 1e-3, 10**1.5, 19)
FULL = Setting("mnist", 500, "paper", 150.0, 1e-3, 10**1.5, 19)

STYLES = {
    "re-scaling and momentum": (BLUE, "-", "o"),
    "re-scaling": (GREEN, "--", "s"),
    "neither": (VERMILION, "-.", "^"),
}
LABELS = {
    "re-scaling and momentum": "re-scaling and momentum, δ = αΔ + μδ₀",
    "re-scaling": "re-scaling, no momentum, δ = αΔ",
    "neither": "neither, δ = Δ",
}


def make(config: FigureConfig) -> list[Path]:
    """Train, try every γ from there, draw."""
    setting = QUICK if config.quick else FULL
    session, task = trained(config, setting)
    optimizer = session.optimizer
    assert isinstance(optimizer, KFAC)
    cases = task.train.select(session.sampler.next_indices())
    closure = optimizer.closure(cases.inputs, cases.targets, chunk=CHUNK)
    found = damping_sweep(optimizer, closure, setting.gammas)
    state = optimizer.state_dict()["kfac"]
    lambda_, gamma = float(state["damping"]["lambda_"]), float(state["gamma"]["gamma"])
    where = (
        f"{setting.problem.upper()} autoencoder after {setting.iterations} iterations of "
        f"block-tridiagonal K-FAC (λ₀ = {setting.lambda_:g}, now λ = {lambda_:.2g});\n"
        f"h on the next mini-batch of {len(cases):,} cases, squared error there "
        f"{task.error(session.model, cases):.3g} a case"
    )
    title = "Figure 7: what a step improves, against the damping of the approximate Fisher"
    figure = _draw(f"{title}\n{where}", found, gamma)
    return publish(config, figure, f"{title}\n{where}", found, _numbers(found, gamma))


def trained(config: FigureConfig, setting: Setting) -> tuple[Session, Task]:
    """The session after the iteration that the figure is of, and its task."""
    batch = config.cases or setting.batch
    folder = (
        f"figure-7-{setting.problem}-m{batch}-lambda{setting.lambda_:g}-iterations{setting.iterations}"
        f"-threads{config.threads}-seed{config.seed}"
    )
    train = TrainConfig(
        problem=setting.problem,
        batch=batch,
        kfac=KfacOptions("block_tridiagonal", "paper", setting.lambda_),
        average=0,
        limits=Limits(iterations=setting.iterations),
        recording=Recording(evaluate_every=0),
        seed=config.seed,
        run_dir=config.runs / folder,
        threads=config.threads,
    )
    task = load_task(train)
    run_or_continue(train, task, Console(highlight=False, soft_wrap=True))
    task = task.to(torch.device("cpu"), torch.float32)
    session = Session(resolved(train, cases=len(task.train), weight_decay=task.weight_decay), task)
    session.load_state_dict(torch.load(train.folder / CHECKPOINT, weights_only=True))
    return session, task


def _best(found: Sequence[Improvement], rule: str) -> Improvement:
    """The largest improvement of one rule; NaN counts as nothing."""
    return max(
        (one for one in found if one.rule == rule),
        key=lambda one: -math.inf if math.isnan(one.improvement) else one.improvement,
    )


def _numbers(found: Sequence[Improvement], gamma: float) -> list[Number]:
    numbers = [Number("γ of K-FAC itself", gamma)]
    for rule in STYLES:
        best = _best(found, rule)
        improving = [one.gamma for one in found if one.rule == rule and one.improvement > 0]
        numbers += [
            Number(f"{rule}: largest improvement", best.improvement),
            Number(f"{rule}: at γ", best.gamma),
            Number(f"{rule}: smallest γ tried that improves", min(improving, default=math.nan)),
        ]
    return numbers


def _draw(title: str, found: Sequence[Improvement], gamma: float) -> Figure:
    figure = Figure(figsize=(8.5, 5.4), layout="constrained")
    figure.suptitle(title, fontsize=10.5)
    axes = figure.subplots()
    top = max(_best(found, rule).improvement for rule in STYLES)
    bottom = -0.35 * top if top > 0 else None
    for rule, (colour, line, marker) in STYLES.items():
        points = [one for one in found if one.rule == rule]
        axes.plot(
            [one.gamma for one in points],
            [one.improvement for one in points],
            linestyle=line,
            color=colour,
            marker=marker,
            markersize=5,
            linewidth=1.8,
            label=LABELS[rule],
        )
    axes.axhline(0.0, color=BLACK, linewidth=0.8)
    axes.axvline(gamma, color=BLACK, linewidth=1.0, linestyle=":", label=f"γ of K-FAC, {gamma:.2g}")
    axes.set_xscale("log")
    axes.set_xlabel("γ, strength of the factored Tikhonov damping")
    axes.set_ylabel("improvement of the objective, h(θ) − h(θ + δ)")
    if bottom is not None:
        axes.set_ylim(bottom, 1.08 * top)
        _say_what_is_below(axes, found, bottom)
    axes.grid(True, alpha=0.25)
    axes.legend(fontsize=9)
    return figure


def _say_what_is_below(axes: Axes, found: Sequence[Improvement], bottom: float) -> None:
    """A line of text for the steps of a rule that are off the scale: for which γ, and how far."""
    lines = 0
    for rule, (colour, _, _) in STYLES.items():
        # A step that overflows is NaN or infinite, and counts as infinitely far.
        below = [one for one in found if one.rule == rule and not one.improvement >= bottom]
        if not below:
            continue
        gamma = max(one.gamma for one in below)
        depth = max(
            -one.improvement if math.isfinite(one.improvement) else math.inf for one in below
        )
        axes.text(
            0.02,
            0.03 + 0.05 * lines,
            f"{rule}: below the frame for γ ≤ {gamma:.2g}, down to −{depth:,.0f}",
            transform=axes.transAxes,
            color=colour,
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none"},
        )
        lines += 1
