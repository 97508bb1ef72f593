"""The folder of a run: what is in it, and how it survives being killed.

- `config.json`: the configuration, versions and machine
- `metrics.jsonl`: an object an iteration
- `checkpoint.pt`: all that the next iteration depends on, and the length of `metrics.jsonl` then; written
  first before the first iteration
- `diverged.json`: why the run can't go on, if it diverged

Files are replaced whole: after kill -9 at any moment there is the old one or the new one. `metrics.jsonl`
only grows, and is cut back to where the checkpoint left it when a run goes on; it is locked as long as a
process trains in the folder.
"""

import json
import math
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import torch

from kronfac import KronfacError
from kronfac_experiments.config import GROUPS, TrainConfig
from kronfac_experiments.files import (
    is_unfinished,
    remove_unfinished,
    sync_folder,
    try_lock,
    write_atomically,
    write_json,
)
from kronfac_experiments.machine import machine, versions
from kronfac_experiments.optimizers import DivergedError

FORMAT = 2
CONFIG, METRICS, CHECKPOINT = "config.json", "metrics.jsonl", "checkpoint.pt"
DIVERGED = "diverged.json"


class RunError(KronfacError):
    """A run directory is missing, in the way, or not what it should be."""


def check_new(path: Path) -> None:
    """Refuse a folder that has something in it."""
    if path.exists() and (not path.is_dir() or not all(map(_is_left_by_a_start, path.iterdir()))):
        raise RunError(
            f"{path} is there already, and runs are not overwritten: continue it with "
            f"--resume {path}, or name another folder with --run-dir."
        )


def _is_left_by_a_start(path: Path) -> bool:
    """Whether a run that was killed before it wrote its configuration left it."""
    return is_unfinished(path) or (path.name == METRICS and path.stat().st_size == 0)


def check_not_diverged(path: Path) -> None:
    """Raise what the run in this folder ended with, if it diverged."""
    file = path / DIVERGED
    if file.is_file():
        try:
            message = json.loads(file.read_text(encoding="utf-8"))["message"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{file} is damaged: {error!r}.") from error
        raise DivergedError(message)


def read_config(path: Path) -> TrainConfig:
    """The configuration of the run in this folder."""
    record = _read_record(path)
    try:
        values = dict(record["config"])
        for name, kind in GROUPS.items():
            values[name] = kind(**values[name])
        values["data"] = None if values["data"] is None else Path(values["data"])
        return TrainConfig(**values)
    except (KeyError, TypeError, AttributeError) as error:
        raise RunError(f"{path / CONFIG} is not one of kronfac train: {error!r}.") from error


def check_data(path: Path, sha256: str | None) -> None:
    """Refuse to go on with other data than the run began with."""
    if _read_record(path)["data_sha256"] != sha256:
        raise RunError(f"The data file of {path} has changed since that run began.")


def _read_record(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise RunError(f"There is no run directory {path}.")
    file = path / CONFIG
    if not file.is_file():
        hint = ""
        if all(map(_is_left_by_a_start, path.iterdir())):
            hint = " If a run was killed there before it began, start it again without --resume."
        raise RunError(f"{path} is no run directory: it has no {CONFIG}.{hint}")
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{file} is damaged: {error}.") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise RunError(f"{file} is not of a run that this kronfac can continue.")
    return record


class RunDirectory:
    """An open run: a context that makes the folder, keeps other processes out, and closes its files.

    Args:
        path: The folder.
        config: Resolved.
        sha256: Checksum of a user's own data file.
    """

    def __init__(self, path: Path, config: TrainConfig, sha256: str | None) -> None:
        self.path = path
        self._config, self._sha256 = config, sha256
        self._metrics: IO[bytes] | None = None

    def __enter__(self) -> "RunDirectory":
        self.path.mkdir(parents=True, exist_ok=True)
        sync_folder(self.path.parent)
        self._metrics = (self.path / METRICS).open("ab")
        if not try_lock(self._metrics):
            self._metrics.close()
            raise RunError(
                f"Another process is training in {self.path}: wait until it has ended, or name "
                "another folder with --run-dir."
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._metrics is not None:
            self._metrics.close()

    def start(self, state: dict[str, Any] | None) -> None:
        """Open for writing; forget what came after this checkpoint."""
        assert self._metrics is not None
        write_json(self.path / CONFIG, _record(self._config, self._sha256))
        self._metrics.truncate(0 if state is None else state["metrics_bytes"])
        self._metrics.seek(0, os.SEEK_END)
        (self.path / DIVERGED).unlink(missing_ok=True)
        remove_unfinished(self.path)

    def log(self, row: dict[str, Any]) -> None:
        """Add an iteration; numbers that are not finite, which JSON has not, become null."""
        assert self._metrics is not None
        clean = {name: _finite(value) for name, value in row.items()}
        self._metrics.write(json.dumps(clean, ensure_ascii=False).encode() + b"\n")
        self._metrics.flush()

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint; what was logged so far is on the disk before it is."""
        assert self._metrics is not None
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        content = {
            **state,
            "format": FORMAT,
            "metrics_bytes": self._metrics.tell(),
        }
        write_atomically(self.path / CHECKPOINT, lambda stream: torch.save(content, stream))

    def diverged(self, message: str) -> None:
        """Note that the run ends here."""
        write_json(self.path / DIVERGED, {"message": message})

    def load(self, device: torch.device) -> dict[str, Any] | None:
        """The checkpoint to continue from; None if nothing was written before it.

        Raises:
            RunError: it is damaged or lost, or another version of kronfac wrote it.
        """
        path, metrics = self.path / CHECKPOINT, self.path / METRICS
        length = metrics.stat().st_size
        if not path.is_file():
            if length:
                raise RunError(
                    f"{self.path} has metrics but no checkpoint: there is nothing to resume from. "
                    "Start again in another folder."
                )
            return None
        try:
            state = torch.load(path, weights_only=True, map_location=device)
        except (MemoryError, torch.OutOfMemoryError):  # of this machine, not of the file
            raise
        except Exception as error:  # of many kinds, depending on which byte is wrong
            reason = " ".join(str(error).split())[:200]
            raise RunError(
                f"{path} is damaged ({reason}): start again in another folder."
            ) from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise RunError(f"{path} is not a checkpoint that this kronfac can read.")
        if length < state["metrics_bytes"]:
            raise RunError(
                f"{metrics} is shorter than when the checkpoint was written: start again in "
                "another folder."
            )
        return state

    @property
    def files(self) -> list[str]:
        """What is there, for the last line of the command."""
        names = (CONFIG, METRICS, CHECKPOINT)
        return [name for name in names if (self.path / name).exists()]


def _record(config: TrainConfig, sha256: str | None) -> dict[str, Any]:
    content = asdict(replace(config, run_dir=None, resume=None))
    content["data"] = None if config.data is None else str(config.data)
    if config.optimizer != "kfac":
        content["kfac"] = {}
    return {
        "format": FORMAT,
        "name": config.name,
        "config": content,
        "data_sha256": sha256,
        "versions": versions(),
        "machine": machine(),
    }


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
