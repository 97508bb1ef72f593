"""The MNIST autoencoder beside the authors' own logged run.

`presets.paper()`, block-tridiagonal inverse, the paper's growing mini-batch, 200 iterations, several
seeds. The authors' numbers below are read off the log of their program. With `--log` the columns m and
new_lambda of that log are compared row by row.

    python benchmarks/authors_run.py --output docs/results/authors_run.md
"""

import csv
import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from rich.progress import Progress

import kronfac
from kronfac_experiments import problems

# Training error of the authors' run, current parameters.
AUTHORS_ERROR = {50: 49.08, 100: 23.58, 150: 8.23, 200: 4.352}
# γ after each of their searches.
AUTHORS_GAMMA = {20: 12.247, 40: 12.247, 60: 7.333, 80: 1.0, 100: 0.599}
GAMMA_FACTOR = (19 / 20) ** 10


@dataclass(frozen=True)
class Settings:
    """K-FAC on MNIST beside the authors' log."""

    seeds: tuple[int, ...] = (0, 1, 2)
    fractions: tuple[float, ...] = (0.25, 1.0)
    """τ₂: the paper's and the program's."""
    inverse: str = "block_tridiagonal"
    iterations: int = 200
    threads: int = 2
    log: Path | None = None
    """The authors' log, a CSV file with columns iter, m, new_lambda."""
    output: Path | None = None
    """Markdown file to write; its numbers go beside it as JSON lines."""


def run(
    seed: int, fraction: float, settings: Settings, progress: Progress
) -> list[dict[str, float]]:
    """One run: a row an iteration."""
    problem = problems.MNIST
    train, _ = problems.load("mnist")
    model = problems.build_model(problem, seed)
    optimizer = kronfac.KFAC(
        model,
        kronfac.Bernoulli(),
        inverse=settings.inverse,
        weight_decay=problem.weight_decay,
        **kronfac.presets.paper() | {"fisher_fraction": fraction},
    )
    sizes = kronfac.ExponentialBatchSize(1000, len(train), 500)
    sampler = kronfac.ScheduledBatchSampler(len(train), sizes, seed=seed)
    rows, seconds, cases = [], 0.0, 0
    for k in progress.track(
        range(1, settings.iterations + 1), description=f"seed {seed}, τ₂ = {fraction:g}"
    ):
        x = train[sampler.next_indices()]
        start = time.perf_counter()
        optimizer.step(optimizer.closure(x, x, chunk=5000))
        seconds += time.perf_counter() - start
        cases += len(x)
        report = optimizer.report
        assert report is not None
        assert not report.events, report
        row = {"seed": seed, "fraction": fraction, "k": k, "m": len(x), "cases": cases}
        row |= {"loss": report.loss, "lambda": report.lambda_, "gamma": report.gamma}
        row |= {"alpha": report.alpha, "mu": report.mu, "rho": report.rho, "seconds": seconds}
        if k % 50 == 0:
            row["train_error"] = problems.reconstruction_error(model, train, problem=problem)
        rows.append(row)
    return rows


def compare_with_log(rows: list[dict[str, float]], log: Path) -> str:
    """Whether m and λ equal the log's columns."""
    with log.open() as file:
        theirs = {int(row["iter"]): row for row in csv.DictReader(file)}
    wrong_m = [r["k"] for r in rows if int(theirs[int(r["k"])]["m"]) != r["m"]]
    wrong_lambda = [
        r["k"]
        for r in rows
        if (logged := theirs[int(r["k"])]["new_lambda"])
        and abs(float(logged) / r["lambda"] - 1) > 1e-4  # the log has five digits
    ]
    return (
        f"Against the log, all runs and iterations: m differs at {wrong_m or 'none'}, "
        f"λ differs at {wrong_lambda or 'none'}."
    )


def gamma_story(rows: list[dict[str, float]]) -> str:
    """When γ left its first value, when it was at most 1, and how it fell from there."""
    searched = [r for r in rows if r["k"] % 20 == 0]
    first = rows[0]["gamma"]
    left = next((r["k"] for r in searched if r["gamma"] != first), None)
    below = next((r["k"] for r in searched if r["gamma"] <= 1), None)
    falling = [b["gamma"] / a["gamma"] for a, b in itertools.pairwise(searched) if a["gamma"] <= 1]
    factors = ", ".join(f"{f:.3f}" for f in sorted({round(f, 3) for f in falling}))
    return f"{first:.3f} left at {left}, ≤ 1 from {below}, factors after that: {factors}"


def table(all_rows: list[list[dict[str, float]]], settings: Settings) -> str:
    """Medians over the seeds beside the authors' numbers."""
    marks = [k for k in AUTHORS_ERROR if k <= settings.iterations]
    lines = [
        f"MNIST autoencoder, `presets.paper()`, {settings.inverse}, η = 1e-5, float32, "
        f"{settings.threads} threads, seeds {settings.seeds}, chunks of 5000, torch {torch.__version__}.",
        "",
        "Training error (squared reconstruction error a case, all 60,000 cases), median of the seeds "
        "(smallest – largest), and the median over the authors' number. Seconds are of optimiser time; "
        "on a machine with other work they say little:",
        "",
        "| τ₂ | " + " | ".join(f"iteration {k}" for k in marks) + " | seconds |",
        "| --- |" + " --- |" * (len(marks) + 1),
        "| authors' log (1) | " + " | ".join(f"{AUTHORS_ERROR[k]}" for k in marks) + " | – |",
    ]
    for fraction in settings.fractions:
        runs = [rows for rows in all_rows if rows[0]["fraction"] == fraction]
        cells = []
        for k in marks:
            errors = [rows[k - 1]["train_error"] for rows in runs]
            median = statistics.median(errors)
            cells.append(
                f"{median:.3g} ({min(errors):.3g} – {max(errors):.3g}), {median / AUTHORS_ERROR[k]:.2f}"
            )
        seconds = statistics.median(rows[-1]["seconds"] for rows in runs)
        lines.append(f"| {fraction:g} | " + " | ".join(cells) + f" | {seconds:.0f} |")
    lines += [
        "",
        f"γ in the authors' log: {AUTHORS_GAMMA}, then ω₂ = {GAMMA_FACTOR:.3f} a search. Here:",
        "",
        *(
            f"- seed {rows[0]['seed']:.0f}, τ₂ = {rows[0]['fraction']:g}: {gamma_story(rows)}"
            for rows in all_rows
        ),
        "",
        f"Cases processed by the end: {all_rows[0][-1]['cases']:,.0f} (the log: 504,877 by iteration 200).",
    ]
    if settings.log is not None:
        lines += ["", compare_with_log([r for rows in all_rows for r in rows], settings.log)]
    return "\n".join(lines)


def main(settings: Settings) -> None:
    """Run, print, write."""
    torch.set_num_threads(settings.threads)
    with Progress() as progress:
        all_rows = [
            run(seed, fraction, settings, progress)
            for fraction in settings.fractions
            for seed in settings.seeds
        ]
    text = table(all_rows, settings)
    print(text)
    if settings.output is not None:
        settings.output.write_text(
            "# Beside the authors' own run\n\nMade by `python benchmarks/authors_run.py "
            f"--output {settings.output}`"
            + (" with `--log` and the authors' log" if settings.log else "")
            + f".\n\n{text}\n"
        )
        numbers = settings.output.with_suffix(".jsonl")
        numbers.write_text("".join(json.dumps(row) + "\n" for rows in all_rows for row in rows))
        print(f"\nWritten to {settings.output} and {numbers}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
