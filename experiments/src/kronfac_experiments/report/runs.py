"""Reads run folders: `config.json` and `metrics.jsonl`.

A report is also wanted of a run that is under way, or was killed in the middle of a line.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kronfac import KronfacError

Column = NDArray[np.float64]

STEP_NUMBERS = (
    "iteration",
    "cases",
    "seconds",
    "batch",
    "loss",
    "lambda",
    "gamma",
    "rho",
    "alpha",
    "mu",
)
ERRORS = ("train_error", "test_error", "averaged_train_error", "averaged_test_error")
"""A row has them if they were evaluated; null is one that was not finite."""
METRICS = "metrics.jsonl"
"""What makes a folder a run."""


class ReportError(KronfacError, ValueError):
    """A folder is not a run, a file in it cannot be read, or the page cannot be written."""


@dataclass(frozen=True)
class Run:
    """One run folder.

    Args:
        name: Unique among the runs of a report.
        config: `config.json`, flat; empty if there is none.
        rows: The objects of `metrics.jsonl`, iterations increasing.
        notes: What was left out or out of the ordinary, in words.
        diverged: Whether it ended there.
    """

    name: str
    config: dict[str, str]
    rows: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    diverged: bool = False

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Each number over the rows: NaN if it was not computed; an error is ∞ if it was not finite."""
        columns = {
            name: np.array([_or_nan(row.get(name)) for row in self.rows], dtype=np.float64)
            for name in STEP_NUMBERS
        }
        for name in ERRORS:
            errors = [math.inf if row.get(name, 0) is None else row.get(name) for row in self.rows]
            columns[name] = np.array([_or_nan(error) for error in errors], dtype=np.float64)
        columns["batch"][columns["batch"] == 0] = math.nan  # a row before the first step
        return columns

    @cached_property
    def parts(self) -> dict[str, float]:
        """Milliseconds an iteration by part, over the iterations that were timed."""
        timed = [row["parts"] for row in self.rows if "parts" in row]
        names = dict.fromkeys(part for parts in timed for part in parts)
        return {
            name: 1000 * sum(parts.get(name, 0.0) for parts in timed) / len(timed) for name in names
        }

    def last(self, name: str) -> float | None:
        """The value of the last row that has one; ∞ if that was not finite."""
        values = self.columns[name]
        values = values[~np.isnan(values)]
        return float(values[-1]) if len(values) else None

    @property
    def better_error(self) -> float | None:
        """The last training error, current or averaged, whichever is smaller [MG15 §13]."""
        errors = [self.last("train_error"), self.last("averaged_train_error")]
        return min((error for error in errors if error is not None), default=None)


def run_folders(paths: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """The runs among the paths and directly in them, and the other paths: `runs/*` has all kinds.

    Raises:
        ReportError: one is not there, or there is no run at all.
    """
    folders: list[Path] = []
    others: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ReportError(
                f"There is no run folder '{path}'. Name a folder that `kronfac train` wrote."
            )
        inside = sorted(found.parent for found in path.glob(f"*/{METRICS}"))
        if (path / METRICS).is_file():
            folders.append(path)
        elif inside:
            folders += inside
        else:
            others.append(path)
    if not folders:
        raise ReportError(
            f"'{others[0]}' is no run folder: it has no {METRICS}. "
            "Name a folder that `kronfac train` wrote."
        )
    return folders, others


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs in the order given; a folder that is given twice is read once."""
    resolved = list(dict.fromkeys(folder.resolve() for folder in folders))
    return [
        _read_run(folder, name) for folder, name in zip(resolved, _names(resolved), strict=True)
    ]


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of the way to them as makes them differ."""
    depth = 1
    while True:
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
        depth += 1


def _read_run(folder: Path, name: str) -> Run:
    rows = _read_rows(folder / METRICS)
    notes = []
    events = [(row["iteration"], event) for row in rows for event in row.get("events", ())]
    if events:
        notes.append(f"{len(events)} events, the first in iteration {events[0][0]}: {events[0][1]}")
    if not rows:
        notes.append("metrics.jsonl holds no iteration yet")
    diverged = (folder / "diverged.json").is_file()
    if diverged:
        notes.append("the run diverged, and ends there")
    return Run(name, _read_config(folder / "config.json"), rows, tuple(notes), diverged)


def _read_config(path: Path) -> dict[str, str]:
    """The options, then versions and machine; the problem goes by its name also for a user's own data."""
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        settings = flatten(record.pop("config"), named_by_group=False)
        return settings | {"problem": record.pop("name")} | flatten(record)
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise ReportError(f"The report cannot read '{path}': {error!r}.") from error


def flatten(value: dict[str, Any], named_by_group: bool = True) -> dict[str, str]:
    """{"a": {"b": 1}} as {"a.b": "1"}, or {"b": "1"}, without nulls; lists stay in one piece."""
    flat: dict[str, str] = {}
    for name, inner in value.items():
        if isinstance(inner, dict):
            below = flatten(inner)
            flat |= {f"{name}.{key}": v for key, v in below.items()} if named_by_group else below
        elif inner is not None:
            flat[name] = inner if isinstance(inner, str) else json.dumps(inner, ensure_ascii=False)
    return flat


def _read_rows(path: Path) -> tuple[dict[str, Any], ...]:
    rows = []
    lines = path.read_bytes().splitlines()
    for count, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            if count < len(lines):  # the last line may be being written at this moment
                raise ReportError(
                    f"The report cannot read line {count} of '{path}': {error}."
                ) from error
    return tuple(rows)


def _or_nan(value: Any) -> float:
    return math.nan if value is None else float(value)
