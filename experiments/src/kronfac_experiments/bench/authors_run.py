"""`kronfac bench authors-run`: the MNIST autoencoder beside the authors' own logged run.

`presets.paper()` and the paper's growing mini-batch, several seeds. The authors' numbers are read off the
log of their program.
"""

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from rich.console import Console

from kronfac_experiments.bench import BenchOptions, publish, spread
from kronfac_experiments.config import KfacOptions, TrainConfig, resolved
from kronfac_experiments.optimizers import CHUNK, TrainingFailedError
from kronfac_experiments.options import at_least
from kronfac_experiments.pages.document import Table
from kronfac_experiments.session import Session
from kronfac_experiments.task import Task, load_task

AUTHORS_ERROR = {50: 49.08, 100: 23.58, 150: 8.23, 200: 4.352}
"""Training error of the authors' run by iteration, current parameters."""
AUTHORS_GAMMA = {20: 12.247, 40: 12.247, 60: 7.333, 80: 1.0, 100: 0.599}
"""γ after each of their searches."""
AUTHORS_CASES = 504_877
"""Cases processed by their iteration 200."""
GAMMA_FACTOR = (19 / 20) ** 10
SEARCH_INTERVAL = 20
"""T₂ of the paper."""

Row = dict[str, Any]


@dataclass(frozen=True)
class AuthorsRunConfig(BenchOptions):
    """K-FAC with the paper's constants on the MNIST autoencoder, beside the authors' logged run."""

    seeds: int = 3
    """How many, from --seed on: initial parameters and mini-batches."""
    fractions: tuple[float, ...] = (0.25, 1.0)
    """τ₂: the paper's and the program's."""
    inverse: Literal["block_diagonal", "block_tridiagonal"] = "block_tridiagonal"
    """Approximate inverse Fisher."""
    iterations: int = 200
    """Iterations of each run."""
    rows: Path = Path("runs/authors_run.jsonl")
    """JSON lines, one for each iteration; runs that are there are not repeated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, seeds=self.seeds, iterations=self.iterations)
        if not self.fractions or not all(0 < fraction <= 1 for fraction in self.fractions):
            raise ValueError(f"--fractions are in (0, 1]; got {self.fractions}.")


@dataclass(frozen=True)
class AuthorsTrial:
    """A run."""

    name: str
    seed: int
    fraction: float
    """τ₂."""
    rows: list[Row]
    """An iteration each: k, m, cases, loss, lambda, gamma, alpha, mu, rho, seconds, some train_error."""


def authors_run_command(config: AuthorsRunConfig) -> list[Path]:
    """Run what has not run; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    trials = []
    for fraction in config.fractions:
        for seed in range(config.seed, config.seed + config.seeds):
            name = f"seed {seed}, τ₂ = {fraction:g}"
            rows = _kept(config.rows, seed, fraction)[: config.iterations]
            if len(rows) < config.iterations:
                console.print(name)
                rows = _run(config, name, seed, fraction)
                _keep(config.rows, seed, fraction, rows)
            trials.append(AuthorsTrial(name, seed, fraction, rows))
    settings = (
        f"MNIST autoencoder, presets.paper(), {config.inverse}, η = 1e-5",
        f"{config.seeds} seed(s) in a row, chunks of {CHUNK}",
    )
    title = "Beside the authors' own run"
    written = publish("authors-run", title, config, settings, tables(config, trials))
    return [config.rows, *written]


def _kept(path: Path, seed: int, fraction: float) -> list[Row]:
    """The iterations of a run in the file."""
    if not path.is_file():
        return []
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row for row in lines if (row.pop("seed"), row.pop("fraction")) == (seed, fraction)]


def _keep(path: Path, seed: int, fraction: float, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        for row in rows:
            stream.write(json.dumps({"seed": seed, "fraction": fraction} | row) + "\n")


@cache
def _load() -> Task:
    return load_task(TrainConfig("mnist")).to(torch.device("cpu"), torch.float32)


def _run(config: AuthorsRunConfig, name: str, seed: int, fraction: float) -> list[Row]:
    task = _load()
    options = KfacOptions(inverse=config.inverse, preset="paper", fisher_fraction=fraction)
    train = TrainConfig("mnist", kfac=options, seed=seed, average=0, threads=config.threads)
    train = resolved(train, cases=len(task.train), weight_decay=task.weight_decay)
    session = Session(train, task)
    rows: list[Row] = []
    for k in range(1, config.iterations + 1):
        found = session.step()
        if "events" in found:
            raise TrainingFailedError(f"{name}, iteration {k}: {'; '.join(found['events'])}")
        row = {"k": k, "m": found["batch"]}
        names = ("cases", "loss", "lambda", "gamma", "alpha", "mu", "rho", "seconds")
        row |= {name: found[name] for name in names}
        if k in AUTHORS_ERROR:
            row["train_error"] = task.error(session.model, task.train)
        rows.append(row)
    return rows


def tables(config: AuthorsRunConfig, trials: Sequence[AuthorsTrial]) -> list[Table]:
    """Errors beside the authors' numbers, and what γ did."""
    return [_errors(config, trials), _gammas(trials)]


def _errors(config: AuthorsRunConfig, trials: Sequence[AuthorsTrial]) -> Table:
    marks = [k for k in AUTHORS_ERROR if k <= config.iterations]
    rows = [["authors' log (1)", *(f"{AUTHORS_ERROR[k]}" for k in marks), "–"]]
    for fraction in config.fractions:
        runs = [trial.rows for trial in trials if trial.fraction == fraction]
        cells = []
        for k in marks:
            errors = [rows[k - 1]["train_error"] for rows in runs]
            cells.append(f"{spread(errors, _short)}, {median(errors) / AUTHORS_ERROR[k]:.2f}")
        seconds = median(rows[-1]["seconds"] for rows in runs)
        rows.append([f"{fraction:g}", *cells, f"{seconds:.0f}"])
    note = (
        "Squared reconstruction error a case over all training cases, median of the seeds (smallest – "
        "largest), and the median over the authors' number. Seconds are of optimiser time; on a machine "
        f"with other work they say little. Cases processed by the end: {trials[0].rows[-1]['cases']:,} "
        f"(the log: {AUTHORS_CASES:,} by iteration 200)."
    )
    columns = ["τ₂", *(f"iteration {k}" for k in marks), "seconds"]
    return Table("Training error", columns, rows, note)


def _short(value: float) -> str:
    return f"{value:.3g}"


def _gammas(trials: Sequence[AuthorsTrial]) -> Table:
    """When γ left its first value, when it was at most 1, and how it fell from there."""
    rows = []
    for trial in trials:
        searched = [row for row in trial.rows if row["k"] % SEARCH_INTERVAL == 0]
        first = trial.rows[0]["gamma"]
        left = next((row["k"] for row in searched if row["gamma"] != first), "–")
        below = next((row["k"] for row in searched if row["gamma"] <= 1), "–")
        pairs = itertools.pairwise(row["gamma"] for row in searched)
        falling = {f"{after / before:.3f}" for before, after in pairs if before <= 1}
        rows.append([trial.name, f"{first:.3f}", str(left), str(below), ", ".join(sorted(falling))])
    return Table(
        "γ",
        ["run", "first", "left at", "≤ 1 from", "factors after that"],
        rows,
        f"In the authors' log: {AUTHORS_GAMMA}, then ω₂ = {GAMMA_FACTOR:.3f} a search.",
    )
