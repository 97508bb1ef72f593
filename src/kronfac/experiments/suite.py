"""Several runs for one table, figure or page: each in a folder of its own, none of them run twice."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from kronfac.experiments import run_directory
from kronfac.experiments.config import TrainConfig, resolved
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

    A run that was stopped goes on; one that has reached its limits is left as it is. The data of a
    problem is loaded once.

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
        outcome = run_or_continue(config, tasks[source], console)
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


def error_at(run: Run, axis: str, mark: float) -> float | None:
    """The smaller training error, of current and averaged parameters, last evaluated by then.

    Args:
        run: As `run_suite` returned it.
        axis: `iteration`, `cases` or `seconds`.
        mark: On that axis; evaluations after it do not count.

    Returns:
        None where the run did not get as far as `mark`.
    """
    found: float | None = None
    reached = False
    for row in run.rows:
        if row[axis] > mark:
            reached = True
            break
        errors = _errors(row)
        found = min(errors) if errors else found
        reached = row[axis] == mark
    return found if reached else None


def _errors(row: dict[str, object]) -> list[float]:
    values: Iterable[object] = (row.get("train_error"), row.get("averaged_train_error"))
    return [float(value) for value in values if isinstance(value, int | float)]
