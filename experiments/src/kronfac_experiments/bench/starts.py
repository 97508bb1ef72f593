"""`kronfac bench starts`: does it matter where λ starts? Cases to fixed errors from several λ₀.

Cases are counted as they are computed on: mini-batches, and every trial evaluation of the first one. So
the result does not depend on the machine.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from rich.console import Console

from kronfac_experiments.bench.starts_tables import DEFAULT, StartTrial, tables
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.config import KfacOptions, TrainConfig, hint, resolved
from kronfac_experiments.optimizers import DivergedError
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, described
from kronfac_experiments.pages.publish import publish
from kronfac_experiments.session import Session
from kronfac_experiments.task import Task, load_task

Inverse = Literal["block_diagonal", "block_tridiagonal", "ekfac"]
TARGETS = {
    "curves": (4.0,),
    "mnist": (8.0,),
    "faces": (130.0,),
}
"""Training errors, falling; reached within a minute or two."""
SPACING = 1.02
"""Cases from one evaluation to the next, a factor: the error is known at each two per cent."""


@dataclass(frozen=True)
class StartsConfig(BenchOptions):
    """Cases to fixed training errors, from several λ₀, with everything else as it comes.

    Without --lambda0 the start is found on the first mini-batch; a number is where that search starts.
    The paper has 150 for every problem.
    """

    problems: tuple[Literal["curves", "mnist", "faces"], ...] = ("curves", "mnist", "faces")
    """Autoencoders."""
    inverses: tuple[Inverse, ...] = ("block_diagonal", "block_tridiagonal")
    """Approximate inverses of the Fisher."""
    lambda0: Annotated[tuple[float, ...], hint("FLOAT ...", "1e-3 1 150 1e4")] = (
        1e-3,
        1.0,
        150.0,
        1e4,
    )
    """Where the search for λ₀ starts."""
    default: bool = True
    """Whether the start that needs no number is among them."""
    targets: Annotated[tuple[float, ...], hint("FLOAT ...", "4 on curves, 8, 130")] = ()
    """Training errors to reach, for all problems."""
    seeds: int = 3
    """How many, from --seed on."""
    most_cases: int = 400_000
    """Where a run is given up."""
    evaluation_cases: int = 10_000
    """Training cases that the error is measured on, the first ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, seeds=self.seeds, most_cases=self.most_cases)
        at_least(1, evaluation_cases=self.evaluation_cases)
        if not all(0 < value < math.inf for value in (*self.lambda0, *self.targets)):
            raise ValueError("--lambda0 and --targets are positive and finite.")
        if not (self.lambda0 or self.default) or not self.problems or not self.inverses:
            raise ValueError("There is nothing to run: name a problem, an inverse and a start.")

    def falling(self, problem: str) -> tuple[float, ...]:
        """Its targets, the easiest first."""
        return tuple(sorted(self.targets or TARGETS[problem], reverse=True))


def starts_command(config: StartsConfig) -> list[Path]:
    """Run what has not run; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    path = config.folder("starts") / "starts.json"
    names = ("targets", "most_cases", "evaluation_cases", "threads")
    settings: dict[str, Any] = {name: getattr(config, name) for name in names}
    settings["targets"] = list(config.targets)
    load = cache(_load)
    jobs = {}
    for problem in config.problems:
        for inverse in config.inverses:
            for seed in range(config.seed, config.seed + config.seeds):
                for lambda0 in ((None,) if config.default else ()) + config.lambda0:
                    options = KfacOptions(inverse=inverse, lambda0=lambda0)
                    name = f"{problem}, {inverse.replace('_', '-')}, {_start(lambda0)}, seed {seed}"
                    train = TrainConfig(problem, kfac=options, seed=seed, threads=config.threads)
                    jobs[name] = partial(_run, config, train, name, load)
    trials = run_trials(path, settings, StartTrial, jobs, console)
    return publish(_document(config, trials), path, config.output, console)


def _start(lambda0: float | None) -> str:
    return DEFAULT if lambda0 is None else f"λ₀ {lambda0:g}"


def _load(problem: str) -> Task:
    return load_task(TrainConfig(problem)).to(torch.device("cpu"), torch.float32)


def _run(
    config: StartsConfig,
    train: TrainConfig,
    name: str,
    load: Callable[[str], Task],
    advance: Advance,
) -> StartTrial:
    """Until the last target, or as many cases as there may be."""
    problem = str(train.problem)
    task = load(problem)
    train = resolved(train, cases=len(task.train), weight_decay=task.weight_decay)
    session = Session(train, task)
    evaluated = task.train.first(config.evaluation_cases)
    targets = config.falling(problem)
    reached: list[dict[str, float]] = []
    error, due, backs, message = math.inf, 0.0, 0, ""
    first_lambda = settled = None
    while len(reached) < len(targets) and session.cases < config.most_cases:
        try:
            row = session.step()
        except DivergedError as failure:
            message = str(failure)
            break
        first_lambda = row["lambda"] if session.iteration == 1 else first_lambda
        settled = row["lambda"] if session.iteration <= 20 else settled
        backs += sum(event.startswith("rejected") for event in row.get("events", ()))
        if session.cases < due:
            continue
        due = SPACING * session.cases
        error = task.error(session.model, evaluated)
        while len(reached) < len(targets) and error <= targets[len(reached)]:
            advance(1 / len(targets))
            reached.append(
                {
                    "target": targets[len(reached)],
                    "cases": session.cases,
                    "iterations": session.iteration,
                    "seconds": session.seconds,
                    "batch": row["batch"],
                }
            )
    advance(1 - len(reached) / len(targets))
    return StartTrial(
        name=name,
        problem=problem,
        inverse=train.kfac.inverse,
        start=_start(train.kfac.lambda0),
        seed=train.seed,
        targets=list(targets),
        reached=reached,
        cases=session.cases,
        error=error if math.isfinite(error) else None,
        first_lambda=first_lambda,
        settled_lambda=settled,
        taken_back=backs,
        message=message,
    )


def _document(config: StartsConfig, trials: list[StartTrial]) -> Document:
    return Document(
        title="Where λ starts",
        command=command_line("bench starts", config),
        settings=described(
            config.threads,
            config.seed,
            "K-FAC's defaults, kronfac's adaptive mini-batches",
            f"η of the problem, error on the first {config.evaluation_cases:,} training cases",
            f"seeds {config.seed} to {config.seed + config.seeds - 1}",
            f"given up at {config.most_cases:,} cases",
        ),
        tables=tables(trials),
    )
