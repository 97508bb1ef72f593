"""The one place where commands with many short trials keep them, so that none of them is run twice.

A file holds trials of one kind of dataclass and the settings that all of them depend on. It is replaced
whole after every trial; a command that was stopped, however that happened, goes on with the next one.
"""

import json
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from kronfac_experiments.atomic_files import write_json
from kronfac_experiments.machine import machine, versions
from kronfac_experiments.run_directory import RunError
from kronfac_experiments.train import TrainingInterruptedError

K = TypeVar("K")
T = TypeVar("T")


class TrialStore(Mapping[K, T]):
    """The trials that a file holds, by key.

    Args:
        path: The JSON file, in a folder that may have to be made.
        settings: What every trial depends on, as JSON has it.
        kind: The dataclass of a trial.
        key: Tells trials apart; a later trial takes the place of an earlier one with its key.
        order: What the file is sorted by; by when they ended, without it.

    Raises:
        RunError: the file is damaged, or of other settings.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        kind: Callable[..., T],
        key: Callable[[T], K],
        order: Callable[[T], Any] | None = None,
    ) -> None:
        self.path = path
        self._settings, self._key, self._order = settings, key, order
        self._trials = {key(trial): trial for trial in _read(path, settings, kind)}

    def __getitem__(self, key: K) -> T:
        return self._trials[key]

    def __iter__(self) -> Iterator[K]:
        return iter(self._trials)

    def __len__(self) -> int:
        return len(self._trials)

    def keep(self, *trials: T) -> None:
        """Add trials that ended together, and write the file."""
        self._trials |= {self._key(trial): trial for trial in trials}
        ended: list[Any] = list(self._trials.values())
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "settings": self._settings,
            "trials": [
                asdict(t) for t in (sorted(ended, key=self._order) if self._order else ended)
            ],
            "versions": versions(),
            "machine": machine(),
        }
        write_json(self.path, content)

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Around a trial: Ctrl-C loses that one, and the message says where the others are.

        Raises:
            TrainingInterruptedError: for Ctrl-C.
        """
        try:
            yield
        except KeyboardInterrupt as stop:
            message = f"Stopped; what has ended is in {self.path}. Continue with the same command."
            raise TrainingInterruptedError(message, signal.SIGINT) from stop


def _read(path: Path, settings: dict[str, Any], kind: Callable[..., T]) -> list[T]:
    """What an earlier command left; nothing if there is no file."""
    if not path.is_file():
        return []
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        saved = content["settings"]
        trials = [kind(**trial) for trial in content["trials"]]
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} is damaged: {error!r}. Delete it.") from error
    if saved != settings:
        names = sorted(name for name in settings if settings[name] != saved.get(name))
        raise RunError(
            f"{path} was made with other settings ({', '.join(names)}); name another folder with "
            "--run-dir."
        )
    return trials
