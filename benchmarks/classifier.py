"""The 16×16 MNIST classifier of [MG15 §3]: full batch, tanh, 256-20-20-20-20-20-10.

The paper reports 5 % training error after 7 iterations and 0 % after 22, and says neither how many cases
were used nor which λ₀. Here: for several numbers of cases, every λ₀ of a grid, and the iterations to
5 % and to 0 %.

    python benchmarks/classifier.py --output docs/results/classifier.md
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.progress import Progress

import kronfac
from kronfac_experiments import problems
from kronfac_experiments.data.mnist import mnist_16x16

PAPER = "| the paper | not said | not said | 7 | 22 | 0 % at 22 |"


@dataclass(frozen=True)
class Settings:
    """Iterations of K-FAC to 5 % and 0 % training error."""

    cases: tuple[int, ...] = (1000, 10_000, 60_000)
    lambdas: tuple[float, ...] = (0.0001, 0.001, 0.01, 0.1, 1.0)
    """λ₀."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the initial parameters and of the sampled targets."""
    inverse: str = "block_tridiagonal"
    iterations: int = 60
    """At most; a run ends at 0 %."""
    threads: int = 2
    output: Path | None = None
    """Markdown file to write the table to."""


@dataclass(frozen=True)
class Run:
    """Training error in per cent after each iteration."""

    cases: int
    lambda_: float
    errors: list[float]

    def iterations_to(self, error: float) -> float:
        """The first iteration with at most this error; infinity if there was none."""
        return next((k for k, e in enumerate(self.errors, 1) if e <= error), math.inf)


def run(cases: int, lambda_: float, seed: int, settings: Settings, progress: Progress) -> Run:
    """Full-batch K-FAC.

    With the paper's T₃ = 20 a run of 22 iterations would have one refresh after the first three, and
    one adaptation of γ. On a network this small they cost nothing: the inverse is refreshed and λ
    adapted in every iteration, γ in every second.
    """
    data = mnist_16x16()
    x, labels = data.train.images[:cases], data.train.labels[:cases]
    model = problems.classifier_model(seed)
    optimizer = kronfac.KFAC(
        model,
        kronfac.Categorical(),
        inverse=settings.inverse,
        fisher=kronfac.SampledFisher(seed=seed),
        damping=kronfac.LevenbergMarquardt(lambda_=lambda_, interval=1, decay=0.8),
        gamma=kronfac.GammaSearch(interval=2, factor=0.7),
        inverse_interval=1,
    )
    errors: list[float] = []
    for _ in progress.track(
        range(settings.iterations), description=f"{cases} cases, λ₀ = {lambda_:g}, seed {seed}"
    ):
        optimizer.step(optimizer.closure(x, labels, chunk=20_000))
        with torch.no_grad():
            wrong = int((model(x).argmax(dim=1) != labels).sum())
        errors.append(100 * wrong / cases)
        if not wrong:
            break
    return Run(cases, lambda_, errors)


def cell(numbers: list[float], unit: str = "") -> str:
    """Median (smallest – largest)."""
    median, low, high = (f(numbers) for f in (statistics.median, min, max))
    shown = ["not" if math.isinf(n) else f"{n:.3g}{unit}" for n in (median, low, high)]
    return f"{shown[0]} ({shown[1]} – {shown[2]})"


def table(runs: list[Run], settings: Settings) -> str:
    """Every λ₀ for every number of cases, the best of each in bold."""
    lines = [
        f"{settings.inverse}, full batch, τ₁ = τ₂ = 1, float32, {settings.threads} threads, Glorot "
        f"initialisation, seeds {settings.seeds}: median (smallest – largest). T₁ = 1 with ω₁ = 0.8, "
        f"T₂ = 2 with ω₂ = 0.49, T₃ = 1, at most {settings.iterations} iterations.",
        "",
        "| | cases | λ₀ | iterations to 5 % | to 0 % | error at the end |",
        "| --- | --- | --- | --- | --- | --- |",
        PAPER,
    ]
    for cases in settings.cases:
        groups = {
            lambda_: [r for r in runs if (r.cases, r.lambda_) == (cases, lambda_)]
            for lambda_ in settings.lambdas
        }

        def quality(lambda_: float, groups: dict[float, list[Run]] = groups) -> tuple[float, float]:
            group = groups[lambda_]
            return (
                statistics.median(r.iterations_to(0) for r in group),
                statistics.median(r.errors[-1] for r in group),
            )

        best = min(groups, key=quality)
        for lambda_, group in groups.items():
            mark = "**" if lambda_ == best else ""
            lines.append(
                f"| {mark}here{mark} | {cases:,} | {lambda_:g} | "
                f"{cell([r.iterations_to(5) for r in group])} | "
                f"{cell([r.iterations_to(0) for r in group])} | "
                f"{cell([r.errors[-1] for r in group], ' %')} |"
            )
    return "\n".join(lines)


def main(settings: Settings) -> None:
    """Run, print, write."""
    torch.set_num_threads(settings.threads)
    with Progress() as progress:
        runs = [
            run(cases, lambda_, seed, settings, progress)
            for cases in settings.cases
            for lambda_ in settings.lambdas
            for seed in settings.seeds
        ]
    text = table(runs, settings)
    print(text)
    if settings.output is not None:
        settings.output.write_text(
            "# The classifier of section 3\n\nMade by `python benchmarks/classifier.py --output "
            f"{settings.output}`.\n\n{text}\n"
        )
        print(f"\nWritten to {settings.output}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
