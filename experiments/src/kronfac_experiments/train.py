"""`kronfac train`: run an optimizer on a problem, write what it did, continue where it stopped."""

import os
import shlex
import signal
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from rich.console import Console

from kronfac import KronfacError
from kronfac_experiments import run_directory
from kronfac_experiments.config import Limits, TrainConfig, resolved
from kronfac_experiments.evaluation import (
    best_error,
    evaluate,
    evaluation_due,
)
from kronfac_experiments.machine import usable_device
from kronfac_experiments.optimizers import DivergedError
from kronfac_experiments.progress import Display, number
from kronfac_experiments.run_directory import RunDirectory, RunError
from kronfac_experiments.session import Session, step_or_explain
from kronfac_experiments.task import Task, load_task


class Interrupts:
    """While this context is open, the first signal is remembered and the second one kills as usual.

    Outside of the main thread, where Python does not let signals be handled, it does nothing.

    Args:
        notify: Called at the first signal.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.received: signal.Signals | None = None
        self._notify = notify
        self._former: dict[signal.Signals, object] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():
            for which in (signal.SIGINT, signal.SIGTERM):
                self._former[which] = signal.signal(which, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        for which, handler in self._former.items():
            signal.signal(which, handler)  # type: ignore[arg-type]

    def _remember(self, received: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(received)
        for other in self._former:
            default = signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL
            signal.signal(other, default)
        self._notify()


class RunEndedError(RunError):
    """A run that is to be resumed has reached its limits already."""

    def __init__(self, message: str, outcome: "Outcome") -> None:
        super().__init__(message)
        self.outcome = outcome


class TrainingInterruptedError(KronfacError):
    """Ctrl-C or SIGTERM; the run is saved."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    path: Path
    reason: str
    iteration: int
    cases: int
    seconds: float
    errors: dict[str, float]
    files: tuple[str, ...]


def train_command(config: TrainConfig) -> None:
    """Train, and say what came out and where it is."""
    console = Console(highlight=False, soft_wrap=True)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError(
            "kronfac train runs in one process, and torchrun has started several. To train on several, use "
            "KFAC in a program of your own, as docs/howto/several_processes.md shows."
        )
    outcome = train(config, console=console)
    said = [f"{name.replace('_', ' ')} {number(error)}" for name, error in outcome.errors.items()]
    console.print(
        f"Stopped after {outcome.reason}: {', '.join(said)}; {outcome.iteration:,} iterations, "
        f"{outcome.cases:,} cases, {outcome.seconds:.1f} s of optimiser time."
    )
    console.print(f"Wrote {outcome.path}: {', '.join(outcome.files)}")


def saved_config(config: TrainConfig) -> TrainConfig | None:
    """What options that are not given mean: with `--resume`, that they are as in the saved run."""
    if config.resume is None:
        return None
    return replace(run_directory.read_config(config.resume), resume=config.resume)


CHANGEABLE = {"iterations", "seconds", "until_error", "checkpoint_every", "resume"}
"""Options that a resumed run may have different: the trajectory does not depend on them."""


def check_folder(config: TrainConfig) -> None:
    """Refuse a new run in a folder that has one, and a resumed run with other options than it began with.

    Raises:
        RunError: it is one of these.
    """
    if config.resume is None:
        run_directory.check_new(config.folder)
        return
    given, was = _options(config), _options(run_directory.read_config(config.folder))
    changed = [name for name in given if given[name] != was[name] and name not in CHANGEABLE]
    if changed:
        differences = ", ".join(
            f"--{name.replace('_', '-')} {given[name]} (was {was[name]})" for name in changed
        )
        raise RunError(
            f"A resumed run goes on as it began; only its limits and --checkpoint-every may "
            f"change. {config.folder} can't be continued with {differences}."
        )


def _options(config: TrainConfig) -> dict[str, Any]:
    """Every option by its name on the command line."""
    flat: dict[str, Any] = {}
    for name, value in asdict(config).items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def train(
    config: TrainConfig,
    *,
    task: Task | None = None,
    console: Console | None = None,
    quiet: bool = False,
) -> Outcome:
    """Run what the configuration says, or continue it, until a limit is reached.

    Args:
        config: What to run. With `resume`: `saved_config` and what is to change of it.
        task: What `load_task(config)` gives, if it is loaded already.
        console: To show progress on.
        quiet: Show nothing.
    """
    console = console or Console()
    check_folder(config)
    path = config.folder
    device = usable_device(config.device)
    torch.set_num_threads(config.threads)
    task = task or load_task(config)
    if config.resume is not None:
        run_directory.check_data(path, task.sha256)
    config = resolved(config, cases=len(task.train), weight_decay=task.weight_decay)
    task = task.to(device, getattr(torch, config.dtype))
    session = Session(config, task)
    if not quiet:
        console.print(describe(config, task))
    directory = RunDirectory(path, config, task.sha256)
    with directory:
        state = _continue(directory, session, config, device)
        directory.start(state)
        if not quiet:
            began = f", from iteration {session.iteration}" if session.iteration else ""
            console.print(f"Run directory {path}{began}")
        try:
            with Display(config.limits, console, quiet) as display:
                reason = _loop(config, task, session, directory, display)
        except DivergedError as error:
            directory.diverged(str(error))
            raise
        except KeyboardInterrupt as error:  # the second Ctrl-C
            raise TrainingInterruptedError(
                "Stopped at once, without saving. Continue from the last checkpoint with: "
                + _resume_command(path),
                signal.SIGINT,
            ) from error
    return _outcome(directory, session, reason)


def _outcome(directory: RunDirectory, session: Session, reason: str) -> Outcome:
    return Outcome(
        path=directory.path,
        reason=reason,
        iteration=session.iteration,
        cases=session.cases,
        seconds=session.seconds,
        errors=session.errors,
        files=tuple(directory.files),
    )


def describe(config: TrainConfig, task: Task) -> str:
    """Problem and method, in two lines."""
    widths = "-".join(map(str, task.layers))
    options = (
        f"{config.kfac.inverse}, preset {config.kfac.preset}, λ₀ {number(config.kfac.lambda0)}"
    )
    if config.optimizer != "kfac":
        given = {"learning rate": config.first_order.lr, "μ_max": config.first_order.mu_max}
        options = (
            ", ".join(f"{k} {v:g}" for k, v in given.items() if v is not None) or "its defaults"
        )
    named = {"paper": "growing mini-batches", "adaptive": "adaptive mini-batches"}
    batch = named.get(str(config.batch), f"mini-batches of {config.batch}")
    return (
        f"{task.name}: {widths}, {type(task.loss).__name__} loss, {len(task.train):,} training and "
        f"{len(task.test):,} test cases\n{config.optimizer}: {options}, {batch}, "
        f"η {number(config.weight_decay)}, seed {config.seed}, {config.threads} CPU thread(s), "
        f"{config.dtype} on {config.device}"
    )


def _continue(
    directory: RunDirectory, session: Session, config: TrainConfig, device: torch.device
) -> dict[str, Any] | None:
    """Bring the session to where the last checkpoint left it; the checkpoint, if there is one."""
    if config.resume is None:
        # Again: another process may have been here in the meantime.
        run_directory.check_new(directory.path)
    state = directory.load(device)
    if state is not None:
        try:
            session.load_state_dict(state)
        except Exception as error:  # of many kinds, depending on what is wrong in it
            raise RunError(f"The checkpoint of {directory.path} does not fit: {error}") from error
        reason = _reached(config.limits, session)
        if reason:
            raise RunEndedError(
                f"{directory.path} has ended already, after {reason}: to go on, give a higher limit.",
                _outcome(directory, session, reason),
            )
    return state


def _reached(limits: Limits, session: Session) -> str | None:
    """The first limit that is reached, in words."""
    if limits.iterations is not None and session.iteration >= limits.iterations:
        return f"{session.iteration:,} iterations"
    if limits.seconds is not None and session.seconds >= limits.seconds:
        return f"{session.seconds:.1f} s of optimiser time"
    if limits.until_error is not None and session.errors:
        error = best_error(session.errors)
        if error <= limits.until_error:
            return f"reaching an error of {number(error)}"
    return None


def _loop(
    config: TrainConfig, task: Task, session: Session, directory: RunDirectory, display: Display
) -> str:
    """Iterate until a limit is reached, and say which."""
    recording = config.recording
    until_error = config.limits.until_error is not None
    saved_at = session.seconds

    def record(row: dict[str, Any], *, evaluated: bool) -> None:
        if evaluated:
            session.errors = evaluate(
                task, session.model, session.average, recording.evaluation_cases
            )
            row |= session.errors
        directory.log(row)
        display.update(row)

    with Interrupts(display.stopping) as interrupts:
        if session.iteration == 0:
            directory.save(session.state_dict())  # from here on, a killed run can be resumed
            record(session.start(), evaluated=True)
        while True:
            row = step_or_explain(session)
            reason = _reached(replace(config.limits, until_error=None), session)
            due = evaluation_due(session.iteration, recording.evaluate_every, until_error)
            record(row, evaluated=due or reason is not None)
            reason = reason or (_reached(config.limits, session) if due else None)
            stopped = interrupts.received
            if reason or stopped or session.seconds - saved_at >= recording.checkpoint_every:
                directory.save(session.state_dict())
                saved_at = session.seconds
            if reason:
                return reason
            if stopped:
                raise TrainingInterruptedError(
                    f"Stopped by {stopped.name} and saved at iteration {session.iteration}. "
                    f"Continue with: {_resume_command(directory.path)}",
                    stopped,
                )


def _resume_command(path: Path) -> str:
    return shlex.join(["kronfac", "train", "--resume", str(path)])
