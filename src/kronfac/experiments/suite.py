"""Several runs for one table, figure or page: each in a folder of its own, none of them run twice."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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


@dataclass(frozen=True)
class Evaluation:
    """Where a run was measured, and what was found."""

    iteration: int
    cases: int
    seconds: float
    error: float
    """The smaller training error, of current and averaged parameters [MG15 §13]."""


def evaluations(run: Run) -> list[Evaluation]:
    """All of a run's, in order; one that was not finite is infinite."""
    found = []
    for row in run.rows:
        if "train_error" in row:
            errors = (row["train_error"], row.get("averaged_train_error"))
            error = min(math.inf if e is None else float(e) for e in errors)
            found.append(Evaluation(row["iteration"], row["cases"], row["seconds"], error))
    return found


def error_at(run: Run, axis: str, mark: float) -> float | None:
    """The error last evaluated by then; None where the run did not get as far as `mark`.

    Args:
        run: As `run_suite` returned it.
        axis: `iteration`, `cases` or `seconds`.
        mark: On that axis; evaluations after it do not count.
    """
    if not run.rows or run.rows[-1][axis] < mark:
        return None
    before = [point.error for point in evaluations(run) if getattr(point, axis) <= mark]
    return before[-1] if before else None


def first_at(run: Run, axis: str, error: float) -> float | None:
    """Where on `axis` the error was first reached, log error being a straight line between evaluations.

    None where it was not reached.
    """
    for before, after in pairwise(evaluations(run)):
        if after.error <= error < before.error:
            start, end = getattr(before, axis), getattr(after, axis)
            if not 0 < after.error < before.error < math.inf:
                return float(end)
            share = math.log(before.error / error) / math.log(before.error / after.error)
            return float(start + share * (end - start))
    return None
