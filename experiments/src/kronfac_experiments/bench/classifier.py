"""`kronfac bench classifier`: the 16×16 MNIST classifier of [MG15 §3] in batch mode.

The paper reports 5 % training error after 7 iterations and 0 % after 22, and says neither how many cases
were used nor which λ₀. Here: for several numbers of cases, every λ₀ of a grid, and the iterations to
5 % and to 0 %.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from rich.console import Console

from kronfac_experiments import problems
from kronfac_experiments.batch_classifier import batch_mode
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.data.mnist import mnist_16x16
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, Table, described, spread
from kronfac_experiments.pages.publish import publish

PAPER = ["the paper", "not said", "not said", "7", "22", "0 % at 22"]


@dataclass(frozen=True)
class ClassifierConfig(BenchOptions):
    """Iterations of K-FAC, in batch mode, to 5 % and 0 % training error of the classifier of section 3."""

    cases: tuple[int, ...] = (1000, 10_000, 60_000)
    """The first so many training cases."""
    lambdas: tuple[float, ...] = (0.0001, 0.001, 0.01, 0.1, 1.0)
    """λ₀."""
    seeds: int = 3
    """How many, from --seed on: initial parameters and sampled targets."""
    inverse: Literal["block_diagonal", "block_tridiagonal"] = "block_tridiagonal"
    """Approximate inverse Fisher."""
    iterations: int = 60
    """At most; a run ends at 0 %."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, cases=self.cases, seeds=self.seeds, iterations=self.iterations)
        if not self.lambdas or not all(0 < value < math.inf for value in self.lambdas):
            raise ValueError(f"--lambdas are positive and finite; got {self.lambdas}.")


@dataclass(frozen=True)
class ClassifierTrial:
    """A run: its training error in per cent after each iteration."""

    name: str
    cases: int
    lambda_: float
    seed: int
    errors: list[float]

    def iterations_to(self, error: float) -> float:
        """The first iteration with at most this error; infinity if there was none."""
        return next((k for k, e in enumerate(self.errors, 1) if e <= error), math.inf)


def classifier_command(config: ClassifierConfig) -> list[Path]:
    """Run what has not run; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    path = config.folder("classifier") / "classifier.json"
    settings = {name: getattr(config, name) for name in ("inverse", "iterations", "threads")}
    jobs = {
        name: partial(_run, config, name, cases, lambda_, seed)
        for cases in config.cases
        for lambda_ in config.lambdas
        for seed in range(config.seed, config.seed + config.seeds)
        for name in [f"{cases} cases, λ₀ = {lambda_:g}, seed {seed}"]
    }
    trials = run_trials(path, settings, ClassifierTrial, jobs, console)
    return publish(_document(config, trials), path, config.output, console)


def _run(
    config: ClassifierConfig, name: str, cases: int, lambda_: float, seed: int, advance: Advance
) -> ClassifierTrial:
    train = mnist_16x16().train
    if cases > len(train.images):
        raise ValueError(f"--cases is at most {len(train.images):,}; got {cases}.")
    x, labels = train.images[:cases], train.labels[:cases]
    model = problems.classifier_model(seed)
    steps = batch_mode(model, config.inverse, lambda_, seed)
    errors: list[float] = []
    while len(errors) < config.iterations and (not errors or errors[-1] > 0):
        steps.step(x, labels)
        errors.append(problems.classification_error(model, x, labels))
        advance(1 / config.iterations)
    return ClassifierTrial(name, cases, lambda_, seed, errors)


def _document(config: ClassifierConfig, trials: Sequence[ClassifierTrial]) -> Document:
    return Document(
        title="The classifier of section 3",
        command=command_line("bench classifier", config),
        settings=described(
            config.threads,
            config.seed,
            f"{config.inverse}, full batch, τ₁ = τ₂ = 1, Glorot initialisation",
            f"T₁ = 1 with ω₁ = 0.8, T₂ = 2 with ω₂ = 0.49, T₃ = 1, {config.seeds} seed(s) in a row",
            f"at most {config.iterations} iterations",
        ),
        tables=[table(trials)],
    )


def table(trials: Sequence[ClassifierTrial]) -> Table:
    """Every λ₀ for every number of cases, the best of each in bold."""
    rows = [PAPER]
    for cases in dict.fromkeys(trial.cases for trial in trials):
        own = [trial for trial in trials if trial.cases == cases]
        groups = {
            lambda_: [trial for trial in own if trial.lambda_ == lambda_]
            for lambda_ in dict.fromkeys(trial.lambda_ for trial in own)
        }
        best = min(groups.values(), key=_quality)
        for lambda_, group in groups.items():
            mark = "**" if group is best else ""
            rows.append(
                [
                    f"{mark}here{mark}",
                    f"{cases:,}",
                    f"{lambda_:g}",
                    *(spread([t.iterations_to(error) for t in group], _count) for error in (5, 0)),
                    spread([t.errors[-1] for t in group], lambda error: f"{error:.3g} %"),
                ]
            )
    return Table(
        "Iterations by number of cases and λ₀",
        ["", "cases", "λ₀", "iterations to 5 %", "to 0 %", "error at the end"],
        rows,
        "Median of the seeds (smallest – largest); the best λ₀ for each number of cases in bold.",
    )


def _quality(trials: Sequence[ClassifierTrial]) -> tuple[float, float]:
    """To choose by: iterations to 0 %, then the error at the end."""
    return median(t.iterations_to(0) for t in trials), median(t.errors[-1] for t in trials)


def _count(iterations: float) -> str:
    return "not" if math.isinf(iterations) else f"{iterations:.3g}"
