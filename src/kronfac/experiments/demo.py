"""`make demo`: a deep autoencoder on CURVES, K-FAC beside Adam and Nesterov momentum.

The same network, the same start and the same number of seconds for each; evaluation is not counted.
Ends in a table, a verdict and a picture.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib as mpl
import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor, nn

import kronfac
from kronfac.experiments import problems

EVALUATION_CASES = 2000
"""Of the training set, for the curves; the table's last error is on all of it."""


@dataclass(frozen=True)
class Settings:
    """Train an autoencoder on generated CURVES images with three optimizers, for equal time."""

    seconds: float = 32.0
    """Training time for each optimizer."""
    batch: int = 500
    """Cases in a mini-batch."""
    seed: int = 0
    """Of the initial parameters and the mini-batches."""
    threads: int = 2
    """CPU threads."""
    output: Path = Path("runs/demo")
    """Folder for the picture."""


@dataclass
class Curve:
    """What one optimizer reached."""

    name: str
    seconds: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    iterations: int = 0
    final: float = float("nan")

    def seconds_to(self, error: float) -> float | None:
        """When the error was first reached, if it was."""
        return next((t for t, e in zip(self.seconds, self.errors, strict=True) if e <= error), None)


Step = Callable[[Tensor], object]


def kfac_step(model: nn.Module, loss: nn.Module, weight_decay: float) -> Step:
    """K-FAC with τ₁ = 1/4 and τ₂ = 1/2, everything else as it comes.

    Chosen for the demo as the others' learning rates are: the best of five settings on this problem,
    seed and 25 seconds. Final errors: λ₀ = 1 (the default) 1.3, 0.1 2.9, 0.01 6.4, 10 16.8, all with
    these fractions; with the default fractions of 1, 11.4. One run each; the time at which a run
    leaves the plateau changes with rounding, and with it the final error.
    """
    optimizer = kronfac.KFAC(
        model, loss, weight_decay=weight_decay, statistics_fraction=1 / 4, fisher_fraction=1 / 2
    )
    return lambda x: optimizer.step(optimizer.closure(x, x))


def first_order_step(optimizer: torch.optim.Optimizer, model: nn.Module, loss: nn.Module) -> Step:
    """An ordinary step."""

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        loss(model(x), x).backward()
        optimizer.step()

    return step


def contestants(problem: problems.Problem, seed: int) -> Iterator[tuple[str, nn.Module, Step]]:
    """Each with a model of its own, equal at the start.

    Adam's learning rate is the best of 3e-4, 1e-3 and 3e-3 for this problem and time. Nesterov
    momentum stays on the plateau of the mean image (an error of about 16.7) with 1e-3, 3e-3 and 1e-2
    alike: it needs more than the demo's time to leave it.
    """
    loss = kronfac.Bernoulli()
    eta = problem.weight_decay
    model = problems.build_model(problem, seed)
    yield "K-FAC, τ₁ 1/4, τ₂ 1/2", model, kfac_step(model, loss, eta)
    model = problems.build_model(problem, seed)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=eta)
    yield "Adam, lr 3e-3", model, first_order_step(adam, model, loss)
    model = problems.build_model(problem, seed)
    nesterov = torch.optim.SGD(
        model.parameters(), lr=3e-3, momentum=0.99, nesterov=True, weight_decay=eta
    )
    yield "Nesterov, lr 3e-3, μ 0.99", model, first_order_step(nesterov, model, loss)


def train(
    curve: Curve,
    model: nn.Module,
    step: Step,
    data: Tensor,
    problem: problems.Problem,
    settings: Settings,
    tick: Callable[[Curve], None],
) -> None:
    """Steps until the time is up; the clock stands still while the error is evaluated."""
    sampler = kronfac.ScheduledBatchSampler(len(data), settings.batch, seed=settings.seed)
    sample = data[:EVALUATION_CASES]
    clock, next_evaluation = 0.0, 0.0
    while True:
        if clock >= next_evaluation or clock >= settings.seconds:
            curve.seconds.append(clock)
            curve.errors.append(problems.reconstruction_error(model, sample, problem=problem))
            tick(curve)
            next_evaluation = clock + settings.seconds / 100
            if clock >= settings.seconds:
                break
        x = data[sampler.next_indices()]
        start = time.perf_counter()
        step(x)
        clock += time.perf_counter() - start
        curve.iterations += 1
    curve.final = problems.reconstruction_error(model, data, problem=problem)


def run(settings: Settings, console: Console) -> list[Curve]:
    """Train all of them, with a bar for each."""
    problem = problems.CURVES
    data, _ = problems.load("curves")
    curves = []
    columns = (
        TextColumn("{task.description:<26}"),
        BarColumn(),
        TextColumn("error {task.fields[error]:8.3f}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name, model, step in contestants(problem, settings.seed):
            curve = Curve(name)
            task = progress.add_task(name, total=settings.seconds, error=float("nan"))

            def tick(curve: Curve, task: object = task) -> None:
                progress.update(
                    task,  # type: ignore[arg-type]
                    completed=min(curve.seconds[-1], settings.seconds),
                    error=curve.errors[-1],
                )

            train(curve, model, step, data, problem, settings, tick)
            curves.append(curve)
    return curves


def draw(curves: list[Curve], path: Path) -> None:
    """Error against seconds, logarithmic."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after the backend is chosen

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    # Okabe and Ito's colours, and a line style each: legible without colour too.
    styles = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", "-."))
    for curve, (colour, line) in zip(curves, styles, strict=False):
        axes.semilogy(
            curve.seconds, curve.errors, line, color=colour, label=curve.name, linewidth=2
        )
    axes.set_xlabel("training time, seconds")
    axes.set_ylabel("squared reconstruction error a case")
    axes.set_title("Deep autoencoder on CURVES, 842,340 parameters, one start")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def verdict(curves: list[Curve]) -> list[str]:
    """What the numbers say, in a few lines."""
    kfac, *others = curves
    best = min(others, key=lambda curve: curve.final)
    lines = []
    if kfac.final < best.final:
        lines.append(
            f"K-FAC ended at {kfac.final:.3f}, {best.final / kfac.final:.1f} times lower than the "
            f"best of the others ({best.name}, {best.final:.3f})."
        )
    else:
        lines.append(
            f"K-FAC ended at {kfac.final:.3f}, above {best.name} with {best.final:.3f}: not what we "
            "expect; please tell us about it."
        )
    reached = kfac.seconds_to(best.errors[-1])
    if reached is not None:
        lines.append(
            f"It reached their final error after {reached:.1f} of {best.seconds[-1]:.0f} seconds."
        )
    lines.append(
        f"It took {kfac.iterations} iterations, the others up to {max(c.iterations for c in others)}."
    )
    return lines


def main(settings: Settings) -> None:
    """Train, show, draw."""
    torch.set_num_threads(settings.threads)
    console = Console()
    console.print(
        f"CURVES autoencoder 784-400-200-100-50-25-6 and back, batch {settings.batch}, "
        f"{settings.seconds:.0f} s of training each, {settings.threads} threads, seed {settings.seed}."
    )
    curves = run(settings, console)
    table = Table(
        "optimizer", "iterations", "error at a quarter", "at half", "at the end, all cases"
    )
    for curve in curves:
        points = len(curve.errors) - 1
        table.add_row(
            curve.name,
            str(curve.iterations),
            f"{curve.errors[points // 4]:.3f}",
            f"{curve.errors[points // 2]:.3f}",
            f"{curve.final:.3f}",
        )
    console.print(table)
    for line in verdict(curves):
        console.print(line)
    picture = settings.output / "error_against_seconds.png"
    draw(curves, picture)
    console.print(f"Picture: {picture}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
