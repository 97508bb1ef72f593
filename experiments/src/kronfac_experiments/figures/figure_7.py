"""Figure 7: the improvement of a step against γ, with and without re-scaling and momentum [MG15 §6.4].

The paper takes the MNIST autoencoder at iteration 500 of block-tridiagonal K-FAC, where a mini-batch is
the whole training set. That run goes through 7.2 million cases, about an hour on one core by the time
of its first steps; so it is saved every `SAVE_EVERY` iterations and continued when the command is given
again.

The quick setting is CURVES with mini-batches of 500, at iteration 250, with λ₀ = 10 in place of 150 so
that the network has by then left the plateau at the entropy of the mean image. It matters: on the
plateau (iteration 60, λ₀ = 1 or 150) the finding does not hold: at its best γ the raw Δ improves more
than the re-scaled step at its own.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import kronfac
from kronfac_experiments import checkpoint, problems
from kronfac_experiments.atomic_files import write_atomically
from kronfac_experiments.diagnostics import Improvement, damping_sweep
from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.figures.files import Number, show, write
from kronfac_experiments.optimizers import CHUNK, KfacStepper
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, VERMILION
from kronfac_experiments.training import ExponentialBatchSize, ScheduledBatchSampler

SAVE_EVERY = 20


@dataclass(frozen=True)
class Setting:
    """The run before, and the γ to try."""

    problem: str
    iterations: int
    batch: int
    """Cases of a mini-batch; of the first one, if it grows."""
    grows: bool
    """To the whole training set at the last iteration, exponentially [MG15 §13]."""
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


QUICK = Setting("curves", 250, 500, False, 10.0, 1e-3, 10**1.5, 19)
FULL = Setting("mnist", 500, 1000, True, 150.0, 1e-3, 10**1.5, 19)

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
    problem = problems.PROBLEMS[setting.problem]
    data, _ = problems.load(setting.problem)
    run = _Run(config, setting, problem, data)
    run.train()
    x = data[run.sampler.next_indices()]
    found = damping_sweep(run.optimizer, run.optimizer.closure(x, x, chunk=CHUNK), setting.gammas)
    lambda_, gamma = run.damping()
    error = problems.reconstruction_error(run.model, x, problem=problem)
    where = (
        f"{setting.problem.upper()} autoencoder after {setting.iterations} iterations of "
        f"block-tridiagonal K-FAC (λ₀ = {setting.lambda_:g}, now λ = {lambda_:.2g});\n"
        f"h on the next mini-batch of {len(x):,} cases, squared error there {error:.3g} a case"
    )
    title = "Figure 7: what a step improves, against the damping of the approximate Fisher"
    figure = _draw(f"{title}\n{where}", found, gamma)
    paths = write(figure, found, "figure_7", config.output)
    show(f"{title}\n{where}", _numbers(found, gamma), paths)
    return paths


class _Run:
    """The optimizer up to the iteration that the figure is of."""

    def __init__(
        self, config: FigureConfig, setting: Setting, problem: problems.Problem, data: Tensor
    ) -> None:
        self.setting = setting
        self.data = data
        first = min(config.cases or setting.batch, len(data))
        size: int | Callable[[int], int] = first
        if setting.grows:
            size = ExponentialBatchSize(first, len(data), setting.iterations)
        self.sampler = ScheduledBatchSampler(len(data), size, seed=config.seed)
        self.model = problems.build_model(problem, config.seed)
        loss = kronfac.Bernoulli() if problem.loss == "bernoulli" else kronfac.Gaussian()
        self.optimizer = kronfac.KFAC(
            self.model,
            loss,
            inverse="block_tridiagonal",
            weight_decay=problem.weight_decay,
            **kronfac.presets.paper()
            | {
                "fisher": kronfac.extend.SampledFisher(seed=config.seed),
                "damping": kronfac.LevenbergMarquardtRule(lambda_=setting.lambda_),
            },
        )
        self.stepper = KfacStepper(self.optimizer)
        self._what = f"{setting!r}, cases={config.cases}, seed={config.seed}"
        self._file = None if config.quick else config.output / "figure_7_run.pt"

    def train(self) -> None:
        """Take the steps that are left."""
        self._resume()
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed} of {task.total} iterations, loss {task.fields[loss]:.3f}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns) as progress:
            task = progress.add_task(
                f"training on {self.setting.problem.upper()}",
                total=self.setting.iterations,
                completed=self.sampler.iteration,
                loss=math.nan,
            )
            while self.sampler.iteration < self.setting.iterations:
                x = self.data[self.sampler.next_indices()]
                loss = self.stepper.step(x, x).loss
                progress.update(task, advance=1, loss=loss)
                if self.sampler.iteration % SAVE_EVERY == 0:
                    self._save()

    def damping(self) -> tuple[float, float]:
        """λ and γ that the next step would start from."""
        state = self.optimizer.state_dict()["kfac"]
        return float(state["damping"]["lambda_"]), float(state["gamma"]["gamma"])

    def _save(self) -> None:
        if self._file is None:
            return
        self._file.parent.mkdir(parents=True, exist_ok=True)
        content = checkpoint.encode(
            {
                "what": self._what,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "sampler": self.sampler.state_dict(),
            }
        )
        write_atomically(self._file, lambda stream: stream.write(content))

    def _resume(self) -> None:
        if self._file is None or not self._file.is_file():
            return
        try:
            saved = checkpoint.decode(self._file.read_bytes(), torch.device("cpu"))
        except checkpoint.CheckpointError as error:
            raise ValueError(f"{self._file} {error} Remove it.") from error
        if saved["what"] != self._what:
            raise ValueError(
                f"{self._file} is of another run: {saved['what']}, not {self._what}. Give another "
                "--output, or remove it."
            )
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.sampler.load_state_dict(saved["sampler"])


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
