"""Several runs for one table, figure or page: each in a folder of its own, none of them run twice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from kronfac_experiments import run_directory
from kronfac_experiments.config import TrainConfig, resolved
from kronfac_experiments.error_curve import ErrorCurve
from kronfac_experiments.optimizers import DivergedError
from kronfac_experiments.progress import number
from kronfac_experiments.task import Task, load_task
from kronfac_experiments.train import Outcome, RunEndedError, TrainingInterruptedError, train


@dataclass(frozen=True)
class Member:
    """A run of the suite.

    Args:
        label: For people.
        config: With `run_dir`, or with the default folder.
    """

    label: str
    config: TrainConfig


def run_suite(members: Sequence[Member], console: Console) -> list[ErrorCurve]:
    """Run what has not run yet, in the order given, and read the errors of all.

    A run that was stopped goes on; one that has reached its limits, or has diverged, is left as it is.
    The data of a problem is loaded once.

    Raises:
        RunError: a folder holds a run with other settings.
        TrainingInterruptedError: Ctrl-C; what has run is kept.
    """
    tasks: dict[object, Task] = {}
    for count, member in enumerate(members, start=1):
        config = member.config
        source = (config.problem, config.data, config.layers)
        if source not in tasks:
            tasks[source] = load_task(config)
        console.print(f"{count} of {len(members)}: {member.label}", highlight=False)
        console.print(f"  {_told(config, tasks[source], console)}", highlight=False)
    return [ErrorCurve.read(member.config.folder) for member in members]


def _told(config: TrainConfig, task: Task, console: Console) -> str:
    """How the run ended, in a line."""
    try:
        outcome = run_or_continue(config, task, console)
    except DivergedError as failure:
        return str(failure)
    except TrainingInterruptedError as error:
        message = f"Stopped and saved in {config.folder.parent}. Continue with the same command."
        raise TrainingInterruptedError(message, error.exit_code - 128) from error
    errors = ", ".join(
        f"{name.replace('_', ' ')} {number(error)}" for name, error in outcome.errors.items()
    )
    return f"{outcome.reason}: {errors}"


def run_or_continue(
    config: TrainConfig, task: Task, console: Console, *, quiet: bool = False
) -> Outcome:
    """The outcome of the run that `config` describes, of which some or all may be there already.

    Raises:
        DivergedError: it diverged, now or before.
    """
    folder = config.folder
    run_directory.check_not_diverged(folder)
    if (folder / run_directory.CONFIG).is_file():
        saved = run_directory.read_config(folder)
        wanted = resolved(config, cases=len(task.train), weight_decay=task.weight_decay)
        config = replace(wanted, resume=folder, run_dir=saved.run_dir)
    try:
        return train(config, task=task, console=console, quiet=quiet)
    except RunEndedError as ended:
        return ended.outcome
