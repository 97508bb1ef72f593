"""Runs measurements one by one; each is written down when it ends, and none is run twice."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kronfac import KronfacError
from kronfac_experiments.machine import versions
from kronfac_experiments.trial_store import TrialStore


class LeftOutError(KronfacError):
    """This measurement can't be made here; the others go on, and it is tried again another time."""


class Trial(Protocol):
    """A dataclass that JSON can hold."""

    @property
    def name(self) -> str:
        """Tells it from the others, and says for people what was measured."""
        ...


T = TypeVar("T", bound=Trial)
Advance = Callable[[float], None]
"""To be told what further share of a measurement is done."""


def run_trials(
    path: Path,
    settings: dict[str, Any],
    kind: type[T],
    jobs: Mapping[str, Callable[[Advance], T]],
    console: Console,
) -> list[T]:
    """What was asked for, in its order and but for what was left out; of an earlier command what it left.

    Args:
        path: The JSON file.
        settings: What every measurement depends on, as JSON has it; versions are added.
        kind: The dataclass of a measurement.
        jobs: By the name that the measurement will have.
        console: To show progress on.

    Raises:
        TrainingInterruptedError: Ctrl-C; what was measured is kept.
    """
    settings = settings | {name: versions()[name] for name in ("kronfac", "torch")}
    trials = TrialStore(path, settings, kind, key=lambda trial: trial.name)
    columns = (
        TextColumn("{task.description:<40.40}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("", total=len(jobs))
        for count, (name, job) in enumerate(jobs.items(), start=1):
            progress.update(bar, description=name)
            if name not in trials:
                console.print(f"{count} of {len(jobs)}: {name}")
                try:
                    with trials.interruptible():
                        trial = job(lambda share: progress.advance(bar, share))
                except LeftOutError as reason:
                    console.print(f"  Left out: {reason}.")
                    continue
                trials.keep(trial)
            progress.update(bar, completed=count)
    return [trials[name] for name in jobs if name in trials]
