"""What a K-FAC step costs, in steps of plain SGD [MG15 §8].

The MNIST autoencoder with `presets.paper()`. Every repeat runs 40 steps of `torch.optim.SGD` and 40 of
K-FAC in one process, one of each in turn on the same mini-batch, two refreshes of the inverse and two
searches for γ among them; its ratio is that of the two mean times. Machines are noisy: look at the
median of the repeats and their spread.

    python benchmarks/step_cost.py --output docs/results/step_cost.md
"""

import platform
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.progress import track

import kronfac
from kronfac.experiments import problems

WARM_UP = 4  # past the three refreshes at the start


@dataclass(frozen=True)
class Settings:
    """Cost of a K-FAC step over one of SGD."""

    batches: tuple[int, ...] = (1000, 5000)
    """Mini-batch sizes m."""
    inverses: tuple[str, ...] = ("block_diagonal", "block_tridiagonal")
    repeats: int = 5
    steps: int = 40
    """A multiple of 20, so that refreshes count in full."""
    threads: int = 2
    output: Path | None = None
    """Markdown file to write the table to."""


@dataclass(frozen=True)
class Row:
    """One inverse at one mini-batch size."""

    inverse: str
    batch: int
    ratios: list[float]
    sgd_seconds: float
    parts: dict[str, float]


def sgd_step(model: torch.nn.Module, optimizer: torch.optim.SGD, x: torch.Tensor) -> float:
    """Seconds of one step of plain SGD."""
    start = time.perf_counter()
    optimizer.zero_grad()
    kronfac.Bernoulli()(model(x), x).backward()
    optimizer.step()
    return time.perf_counter() - start


def kfac_step(optimizer: kronfac.KFAC, x: torch.Tensor) -> float:
    """Seconds of one step of K-FAC."""
    start = time.perf_counter()
    optimizer.step(optimizer.closure(x, x))
    return time.perf_counter() - start


def measure(inverse: str, batch: int, settings: Settings, train: torch.Tensor) -> Row:
    """Interleaved steps of both, from the same start."""
    problem = problems.MNIST
    kfac_model, sgd_model = (problems.build_model(problem, seed=0) for _ in range(2))
    kfac = kronfac.KFAC(
        kfac_model,
        kronfac.Bernoulli(),
        inverse=inverse,
        weight_decay=problem.weight_decay,
        **kronfac.presets.paper(),
    )
    sgd = torch.optim.SGD(sgd_model.parameters(), lr=1e-4)
    sampler = kronfac.ScheduledBatchSampler(len(train), batch, seed=0)
    for _ in range(WARM_UP):
        x = train[sampler.next_indices()]
        sgd_step(sgd_model, sgd, x)
        kfac_step(kfac, x)
    ratios, sgd_means = [], []
    parts: dict[str, float] = defaultdict(float)
    for _ in track(range(settings.repeats), f"{inverse}, m = {batch}"):
        times: list[tuple[float, float]] = []
        for _ in range(settings.steps):
            x = train[sampler.next_indices()]
            times.append((sgd_step(sgd_model, sgd, x), kfac_step(kfac, x)))
            assert kfac.report is not None
            for part, seconds in kfac.report.seconds.items():
                parts[part] += seconds / (settings.repeats * settings.steps)
        sgd_mean, kfac_mean = (statistics.mean(column) for column in zip(*times, strict=True))
        ratios.append(kfac_mean / sgd_mean)
        sgd_means.append(sgd_mean)
    return Row(inverse, batch, ratios, statistics.median(sgd_means), dict(parts))


def table(rows: list[Row], settings: Settings) -> str:
    """The rows as Markdown."""
    parts = list(dict.fromkeys(part for row in rows for part in row.parts))
    lines = [
        f"MNIST autoencoder, `presets.paper()` (τ₁ = 1/8, τ₂ = 1/4), float32, {settings.threads} threads, "
        f"seed 0, torch {torch.__version__}, {platform.processor() or platform.machine()}. "
        f"{settings.repeats} repeats of {settings.steps} interleaved steps. The closure is "
        "`KFAC.closure` in one chunk, whose activations K-FAC's own passes reuse.",
        "",
        "| inverse | m | step / SGD step, median | smallest – largest | SGD step, ms |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row.inverse} | {row.batch} | {statistics.median(row.ratios):.2f} | "
            f"{min(row.ratios):.2f} – {max(row.ratios):.2f} | {1e3 * row.sgd_seconds:.0f} |"
            for row in rows
        ),
        "",
        "Milliseconds of a K-FAC step by part, mean over all steps:",
        "",
        "| inverse | m | " + " | ".join(part.replace("_", " ") for part in parts) + " |",
        "| --- | --- |" + " --- |" * len(parts),
        *(
            f"| {row.inverse} | {row.batch} | "
            + " | ".join(f"{1e3 * row.parts.get(part, 0.0):.1f}" for part in parts)
            + " |"
            for row in rows
        ),
    ]
    return "\n".join(lines)


def main(settings: Settings) -> None:
    """Measure, print and write the table."""
    torch.set_num_threads(settings.threads)
    train, _ = problems.load("mnist")
    rows = [
        measure(inverse, batch, settings, train)
        for inverse in settings.inverses
        for batch in settings.batches
    ]
    text = table(rows, settings)
    print(text)
    if settings.output is not None:
        settings.output.write_text(
            "# Cost of a step\n\nMade by `python benchmarks/step_cost.py --output "
            f"{settings.output}`.\n\n{text}\n"
        )
        print(f"\nWritten to {settings.output}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
