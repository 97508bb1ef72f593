"""Reads run folders: `config.json`, `metrics.jsonl`, `reconstructions.npz`.

Only `metrics.jsonl` has to be there, since a report is also wanted of a run that is under way, was
killed in the middle of a line, or comes from another program. What could not be used is noted and
the notes are shown on the page.
"""

import json
import math
import zipfile
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


class ReportError(KronfacError, ValueError):
    """A folder is not a run, a file in it cannot be read, or the page cannot be written."""


@dataclass(frozen=True)
class Snapshots:
    """Test cases and what the network made of them during training.

    Args:
        iterations: (t,).
        originals: (n, side, side).
        reconstructions: (t, n, side, side).
    """

    iterations: NDArray[np.int64]
    originals: NDArray[np.float64]
    reconstructions: NDArray[np.float64]


@dataclass(frozen=True)
class Run:
    """One run folder.

    Args:
        name: Unique among the runs of a report.
        config: `config.json`; empty if there is none.
        rows: The objects of `metrics.jsonl`, iterations increasing.
        snapshots: None if there are none.
        notes: What was left out or out of the ordinary, in words.
        diverged: Whether it ended there.
    """

    name: str
    config: dict[str, Any]
    rows: tuple[dict[str, Any], ...]
    snapshots: Snapshots | None
    notes: tuple[str, ...]
    diverged: bool = False

    @cached_property
    def columns(self) -> dict[str, Column]:
        """Each number over the rows: NaN if it was not computed, ∞ if it was not finite."""
        columns = {
            name: np.array([_number(row.get(name)) for row in self.rows], dtype=np.float64)
            for name in STEP_NUMBERS
        }
        for name in ERRORS:
            errors = [math.inf if row.get(name, 0) is None else row.get(name) for row in self.rows]
            columns[name] = np.array([_number(error) for error in errors], dtype=np.float64)
        columns["batch"][columns["batch"] == 0] = math.nan  # a row before the first step
        if np.isnan(columns["cases"]).all() and not np.isnan(columns["batch"]).all():
            columns["cases"] = np.nancumsum(columns["batch"])
        return columns

    @cached_property
    def parts(self) -> dict[str, float]:
        """Milliseconds an iteration by part, over the iterations that were timed."""
        timed = [row["parts"] for row in self.rows if isinstance(row.get("parts"), dict)]
        total: dict[str, float] = {}
        for parts in timed:
            for part, seconds in parts.items():
                value = _number(seconds)
                if math.isfinite(value):
                    total[part] = total.get(part, 0.0) + value
        return {part: 1000 * seconds / len(timed) for part, seconds in total.items()}

    def last(self, name: str) -> float | None:
        """The value of the last row that has one; ∞ if that was not finite."""
        values = self.columns[name]
        values = values[~np.isnan(values)]
        return float(values[-1]) if len(values) else None

    def setting(self, name: str) -> str | None:
        """A setting of the configuration, if it is there and is a word or a number."""
        value = self.config.get(name)
        return str(value) if isinstance(value, str | int | float) else None


METRICS = "metrics.jsonl"
"""What makes a folder a run."""


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
    given = {folder.resolve(): folder for folder in reversed(folders)}
    return [
        _read_run(given[folder], name)
        for folder, name in zip(resolved, _names(resolved), strict=True)
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
    rows, notes = _read_rows(folder / METRICS)
    snapshots = None
    if (folder / "reconstructions.npz").is_file():
        try:
            snapshots = _read_snapshots(folder / "reconstructions.npz")
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            notes.append(f"reconstructions.npz was left out: {error}")
    events = [
        (row["iteration"], event)
        for row in rows
        if isinstance(row.get("events"), list)
        for event in row["events"]
    ]
    if events:
        notes.append(f"{len(events)} events, the first in iteration {events[0][0]}: {events[0][1]}")
    if not rows:
        notes.append("metrics.jsonl holds no iteration yet")
    diverged = (folder / "diverged.json").is_file()
    if diverged:
        notes.append("the run diverged, and ends there")
    config = _read_config(folder / "config.json")
    return Run(name, config, tuple(rows), snapshots, tuple(notes), diverged)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ReportError(f"The report cannot read '{path}': {error}.") from error
    if not isinstance(config, dict):
        raise ReportError(
            f"A configuration is a JSON object; '{path}' holds a {type(config).__name__}."
        )
    return config


def _read_rows(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    rows: list[dict[str, Any]] = []
    unreadable = 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ReportError(f"The report cannot read '{path}': {error}.") from error
    for count, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError:
            # The last line may be being written at this moment: nothing to tell.
            unreadable += count < len(lines)
            continue
        if not isinstance(row, dict):
            unreadable += 1
            continue
        if not math.isfinite(_number(row.get("iteration"))):
            row["iteration"] = rows[-1]["iteration"] + 1 if rows else 1
        # A run that was killed and resumed may have written some iterations twice.
        while rows and rows[-1]["iteration"] >= row["iteration"]:
            rows.pop()
        rows.append(row)
    return rows, [f"{unreadable} unreadable lines of metrics.jsonl were left out"] * (
        unreadable > 0
    )


def _read_snapshots(path: Path) -> Snapshots | None:
    # np.load leaves a file that it opened itself and can't read open.
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
        iterations = arrays["iterations"].astype(np.int64)
        originals = arrays["originals"].astype(np.float64)
        reconstructions = arrays["reconstructions"].astype(np.float64)
    if not reconstructions.size:
        return None
    side = round(originals.shape[-1] ** 0.5)
    if originals.ndim != 2 or side * side != originals.shape[1]:
        raise ValueError(f"originals {originals.shape} are not (cases, pixels of a square)")
    if reconstructions.shape != (*iterations.shape, *originals.shape):
        raise ValueError(
            f"reconstructions {reconstructions.shape} do not fit iterations {iterations.shape} "
            f"and originals {originals.shape}"
        )
    return Snapshots(
        iterations,
        originals.reshape(-1, side, side),
        reconstructions.reshape(*reconstructions.shape[:2], side, side),
    )


def _number(value: object) -> float:
    """NaN for what is not a number; ∞ for a number that is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.inf
    except OverflowError:  # an integer beyond all floats
        return math.inf
