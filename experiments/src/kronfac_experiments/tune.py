"""`kronfac tune`: the learning rate of a first-order optimizer by a grid, at equal time each.

Every point of the grid is a run of its own, in a folder of its own; what has run is not run again.
"""

import itertools
import math
import shlex
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from kronfac_experiments.config import FirstOrderOptions, Limits, Recording, TrainConfig, hint
from kronfac_experiments.evaluation import best_error
from kronfac_experiments.optimizers import DivergedError, TrainingFailedError
from kronfac_experiments.progress import number
from kronfac_experiments.suite import run_or_continue
from kronfac_experiments.task import Task, load_task
from kronfac_experiments.train import TrainingInterruptedError
from kronfac_experiments.trial_store import TrialStore

NAG_LR = (0.05, 0.01, 0.005, 0.001, 0.0005, 0.0001)
NAG_MU_MAX = (0.9, 0.99, 0.995, 0.999)
"""The grid of Sutskever et al. (2013), without μ_max = 0, which never won there."""
LR = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""For everything else: half decades."""
RESULT = "tune.json"
Point = tuple[float, float | None]
"""Learning rate, μ_max."""


def _words(values: tuple[float, ...]) -> str:
    return " ".join(f"{value:g}" for value in values)


@dataclass(frozen=True)
class TuneConfig:
    """Find the learning rate of a first-order optimizer: a grid, equal optimiser time each.

    The error that counts is the training error at the end of a run, the smaller one of current and
    averaged parameters. A tuning that was interrupted goes on when the same command is given again.
    """

    problem: Annotated[str | None, tyro.conf.Positional, hint("PROBLEM", "none, for --data")] = None
    """curves, mnist, faces, mnist16 or friedman."""
    data: Annotated[Path | None, hint("FILE.npz", "none")] = None
    """Your own cases, as for kronfac train."""
    layers: Annotated[str | None, hint("WIDTHS", "none")] = None
    """With --data: widths of the encoder, such as 784,100,30."""
    optimizer: str = "nag"
    """nag, or a class of torch.optim by name; K-FAC has nothing to tune."""
    lr: Annotated[
        tuple[float, ...], hint("FLOAT ...", f"{_words(NAG_LR)} for nag, else {_words(LR)}")
    ] = ()
    """Learning rates to try."""
    mu_max: Annotated[tuple[float, ...], hint("FLOAT ...", f"{_words(NAG_MU_MAX)} for nag")] = ()
    """Ceilings of nag's momentum to try."""
    seconds: float = 20.0
    """Seconds of optimiser time for each point of the grid, in the first round."""
    rounds: int = 1
    """Rounds of successive halving: the better half goes on until twice the time, and so on."""
    batch: Annotated[int | None, hint("INT", "250 for nag on curves, else 500")] = None
    """Cases in a mini-batch."""
    evaluation_cases: int = 10_000
    """Training cases, and test cases, that the errors are measured on, the first ones."""
    seed: int = 0
    """Seed of initial parameters and mini-batches."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/tune-PROBLEM-OPTIMIZER")] = None
    """Folder for tune.json and the runs."""
    device: str = "cpu"
    """cpu, cuda, cuda:1, mps, …"""
    threads: int = 2
    """CPU threads."""

    def __post_init__(self) -> None:
        if self.optimizer.lower() == "kfac":
            raise ValueError("kfac has no learning rate to tune; --optimizer is nag, adamw, ….")
        if self.mu_max and self.optimizer.lower() != "nag":
            raise ValueError(f"--mu-max is for nag alone; --optimizer is {self.optimizer}.")
        if not 0 < self.seconds < math.inf:
            raise ValueError(f"--seconds is positive and finite; got {self.seconds}.")
        if self.rounds < 1:
            raise ValueError(f"--rounds is 1 or more; got {self.rounds}.")
        self.run(self.points[0])  # checks the rest

    @property
    def points(self) -> list[Point]:
        """The grid."""
        if self.optimizer.lower() == "nag":
            return list(itertools.product(self.lr or NAG_LR, self.mu_max or NAG_MU_MAX))
        return [(lr, None) for lr in self.lr or LR]

    @property
    def folder(self) -> Path:
        """Where everything is written."""
        name = self.problem or (self.data.stem if self.data else "run")
        return self.run_dir or Path("runs") / f"tune-{name}-{self.optimizer.lower()}"

    def run(self, point: Point) -> TrainConfig:
        """The run of a point of the grid, in the first round."""
        lr, mu_max = point
        name = f"lr{lr:g}" + ("" if mu_max is None else f"-mu{mu_max:g}")
        return TrainConfig(
            problem=self.problem,
            data=self.data,
            layers=self.layers,
            optimizer=self.optimizer,
            batch=self.batch,
            limits=Limits(seconds=self.seconds),
            first_order=FirstOrderOptions(lr, mu_max),
            recording=Recording(
                evaluate_every=0, evaluation_cases=self.evaluation_cases, tensorboard=False
            ),
            seed=self.seed,
            run_dir=self.folder / name,
            device=self.device,
            threads=self.threads,
        )


@dataclass(frozen=True)
class Trial:
    """What one point of the grid reached; an error of None is a run that diverged."""

    lr: float
    mu_max: float | None
    limit: float
    """Seconds that it was given."""
    error: float | None = None
    train_error: float | None = None
    averaged_train_error: float | None = None
    test_error: float | None = None
    iterations: int = 0
    seconds: float = 0.0
    message: str = ""

    @property
    def rank(self) -> tuple[float, float]:
        """Longer runs first, then by error."""
        error = self.error
        return (-self.limit, math.inf if error is None or math.isnan(error) else error)


def tune_command(config: TuneConfig) -> None:
    """Run the grid, show the table, name the best."""
    console = Console(highlight=False, soft_wrap=True)
    path, trials = tune(config, console)
    table = Table("lr", "μ_max", "seconds", "iterations", "train error", "averaged", "test error")
    for trial in trials:
        cells = (trial.lr, trial.mu_max, trial.seconds)
        errors = (trial.train_error, trial.averaged_train_error, trial.test_error)
        table.add_row(
            *(number(cell) for cell in cells),
            f"{trial.iterations:,}",
            *(("diverged", "", "") if trial.error is None else map(number, errors)),
        )
    console.print(table)
    if trials[0].error is None:
        raise TrainingFailedError(f"Every point of the grid diverged. Wrote {path}.")
    console.print(f"Best: {_command(config, trials[0])}")
    console.print(f"Wrote {path} and a run directory for each row beside it.")


def tune(config: TuneConfig, console: Console) -> tuple[Path, list[Trial]]:
    """Run what has not run yet; the result file and the trials, best first."""
    path = config.folder / RESULT
    trials = TrialStore(
        path,
        _settings(config),
        Trial,
        key=lambda trial: (trial.lr, trial.mu_max),
        order=lambda trial: trial.rank,
    )
    task = load_task(config.run(config.points[0]))
    contenders = config.points
    console.print(
        f"{len(contenders)} points, {config.seconds:g} s of optimiser time each, in {config.folder}"
    )
    for round_ in range(config.rounds):
        limit = config.seconds * 2**round_
        for count, point in enumerate(contenders, start=1):
            done = trials.get(point)
            if done is not None and (done.limit >= limit or done.error is None):
                continue
            trial = _run(config, point, limit, task, console)
            trials.keep(trial)
            outcome = trial.message or f"error {number(trial.error)}"
            console.print(f"round {round_ + 1}, {count} of {len(contenders)}: lr {point[0]:g}"
                          + ("" if point[1] is None else f", μ_max {point[1]:g}")
                          + f": {outcome}")  # fmt: skip
        contenders = sorted(contenders, key=lambda p: trials[p].rank)[: -(-len(contenders) // 2)]
    return path, sorted(trials.values(), key=lambda trial: trial.rank)


def _run(config: TuneConfig, point: Point, limit: float, task: Task, console: Console) -> Trial:
    """One point until `limit`, from the start or from where it is."""
    run = replace(config.run(point), limits=Limits(seconds=limit))
    try:
        outcome = run_or_continue(run, task, console, quiet=True)
    except DivergedError as error:
        return Trial(*point, limit=limit, message=str(error))
    except TrainingInterruptedError as error:
        message = f"Stopped and saved in {config.folder}. Continue with the same command."
        raise TrainingInterruptedError(message, error.exit_code - 128) from error
    errors = outcome.errors
    return Trial(
        *point,
        limit=limit,
        error=best_error(errors) if math.isfinite(best_error(errors)) else None,
        train_error=errors["train_error"],
        averaged_train_error=errors.get("averaged_train_error"),
        test_error=errors["test_error"],
        iterations=outcome.iteration,
        seconds=outcome.seconds,
    )


def _settings(config: TuneConfig) -> dict[str, Any]:
    """What the result depends on; more rounds may be asked for later."""
    settings = asdict(config)
    for name in ("run_dir", "rounds"):
        del settings[name]
    settings["data"] = str(config.data) if config.data else None
    return {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}


def _command(config: TuneConfig, best: Trial) -> str:
    words = ["kronfac", "train"]
    words += [config.problem] if config.problem else ["--data", str(config.data)]
    words += ["--layers", config.layers] if config.layers else []
    words += ["--optimizer", config.optimizer, "--lr", f"{best.lr:g}"]
    words += [] if best.mu_max is None else ["--mu-max", f"{best.mu_max:g}"]
    return shlex.join(words)
