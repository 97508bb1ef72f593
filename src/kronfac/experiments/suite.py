"""Several runs for one table, figure or page: each in a folder of its own, none of them run twice."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from kronfac.experiments import run_directory
from kronfac.experiments.config import TrainConfig, resolved
from kronfac.experiments.optimizers import TrainingFailedError
from kronfac.experiments.progress import number
from kronfac.experiments.report.runs import Run, read_runs
from kronfac.experiments.task import Task, load_task
from kronfac.experiments.train import Outcome, RunEndedError, train


@dataclass(frozen=True)
class Member:
    """A run of the suite.

    Args:
        label: For people.
        config: With `run_dir`, or with the default folder.
    """

    label: str
    config: TrainConfig


def run_suite(members: Sequence[Member], console: Console) -> list[Run]:
    """Run what has not run yet, in the order given, and read all of it back.

    A run that was stopped goes on; one that has reached its limits is left as it is. One that diverges
    ends there, and the others run all the same. The data of a problem is loaded once.

    Raises:
        RunError: a folder holds a run with other settings.
    """
    tasks: dict[tuple[str | None, Path | None], Task] = {}
    for count, member in enumerate(members, start=1):
        config = member.config
        source = (config.problem, config.data)
        if source not in tasks:
            tasks[source] = load_task(config)
        console.print(f"{count} of {len(members)}: {member.label}", highlight=False)
        try:
            outcome = run_or_continue(config, tasks[source], console)
        except TrainingFailedError as failure:  # a result too; what came before it was written
            console.print(f"  {failure}", highlight=False)
            continue
        errors = ", ".join(
            f"{name.replace('_', ' ')} {number(error)}" for name, error in outcome.errors.items()
        )
        console.print(f"  {outcome.reason}: {errors}", highlight=False)
    return read_runs([member.config.folder for member in members])


def run_or_continue(config: TrainConfig, task: Task, console: Console) -> Outcome:
    """The outcome of the run that `config` describes, of which some or all may be there already."""
    folder = config.folder
    if (folder / run_directory.CONFIG).is_file():
        saved = run_directory.read_config(folder)
        wanted = resolved(config, cases=len(task.train), weight_decay=task.weight_decay)
        config = replace(wanted, resume=folder, run_dir=saved.run_dir)
    try:
        return train(config, task=task, console=console)
    except RunEndedError as ended:
        return ended.outcome
