"""The file that a command with many short trials keeps, so that none of them is run twice."""

import json
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from kronfac_experiments.atomic_files import write_json
from kronfac_experiments.machine import machine, versions
from kronfac_experiments.run_directory import RunError
from kronfac_experiments.train import TrainingInterruptedError

T = TypeVar("T")


@contextmanager
def finished_are_kept(folder: Path) -> Iterator[None]:
    """Where a trial may be interrupted: what has ended is in the file, and the message says so.

    Raises:
        TrainingInterruptedError: for Ctrl-C.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        message = f"Stopped; the finished runs are in {folder}. Continue with the same command."
        raise TrainingInterruptedError(message, signal.SIGINT) from stop


def write_trials(path: Path, settings: dict[str, Any], trials: Iterable[Any]) -> None:
    """Replace the file.

    Args:
        path: In a folder that may have to be made.
        settings: What a trial depends on, as JSON has it.
        trials: Dataclasses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "settings": settings,
        "trials": [asdict(trial) for trial in trials],
        "versions": versions(),
        "machine": machine(),
    }
    write_json(path, content)


def read_trials(path: Path, settings: dict[str, Any], make: Callable[..., T]) -> list[T]:
    """What an earlier command left; nothing if there is no file.

    Raises:
        RunError: the file is damaged, or of other settings.
    """
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        saved = content["settings"]
        trials = [make(**trial) for trial in content["trials"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error!r}. Delete it.") from error
    if saved != settings:
        names = sorted(name for name in settings if settings[name] != saved.get(name))
        raise RunError(
            f"{path} was made with other settings ({', '.join(names)}); name another folder with "
            "--run-dir."
        )
    return trials
