"""The training error of a run where it was evaluated, and how much faster one run's falls than another's.

x(e), on an axis of iterations, cases or seconds, is where the error is e for the first time. Between two
evaluations log(error) is taken to be linear: 10 iterations apart, the comparison of two runs would
otherwise be one of the grid.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from kronfac_experiments.run_directory import DIVERGED, METRICS

Column = NDArray[np.float64]
Axis = Literal["iteration", "cases", "seconds"]


@dataclass(frozen=True)
class ErrorCurve:
    """Evaluations in order; errors are finite."""

    iteration: Column
    cases: Column
    seconds: Column
    error: Column
    """The smaller one of current and averaged parameters, as [MG15 §13] reports it."""
    diverged: bool = False
    """Whether the run ended because it diverged."""

    @classmethod
    def read(cls, folder: Path) -> "ErrorCurve":
        """The evaluations of the run in a folder, without those that were not finite."""
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines()
        rows = [row for row in map(json.loads, lines) if "train_error" in row]
        names = "train_error", "averaged_train_error"
        errors = [[np.nan if row.get(n) is None else row[n] for n in names] for row in rows]
        error = np.fmin(*np.array(errors, dtype=np.float64).reshape(-1, 2).T)
        known = np.isfinite(error)
        along = {
            n: np.array([row[n] for row in rows], dtype=np.float64)[known] for n in get_args(Axis)
        }
        return cls(**along, error=error[known], diverged=(folder / DIVERGED).is_file())

    @property
    def last(self) -> float:
        """The error at the end of the run; ∞ if it diverged."""
        return math.inf if self.diverged else float(self.error[-1])

    def along(self, axis: Axis) -> Column:
        """Where the evaluations are on the axis."""
        column: Column = getattr(self, axis)
        return column

    @property
    def lowest(self) -> float:
        """The smallest error."""
        return float(self.error.min())

    def end(self, axis: Axis) -> float:
        """Where the last evaluation is."""
        return float(self.along(axis)[-1])

    def at(self, axis: Axis, mark: float) -> float | None:
        """The error at the mark; None beyond the last evaluation."""
        x = self.along(axis)
        if not x[0] <= mark <= x[-1]:
            return None
        return float(np.exp(np.interp(mark, x, np.log(self.error))))

    def reaches(self, axis: Axis, target: float) -> float | None:
        """x(target); None if the error never gets there."""
        below = np.flatnonzero(self.error <= target)
        if not len(below):
            return None
        x, k = self.along(axis), int(below[0])
        if k == 0:
            return float(x[0])
        before, after = float(self.error[k - 1]), float(self.error[k])
        if after == 0:  # of cases misclassified, say: no logarithm
            return float(x[k])
        share = math.log(before / target) / math.log(before / after)
        return float(x[k - 1] + share * (x[k] - x[k - 1]))


def common_error(one: ErrorCurve, other: ErrorCurve) -> float:
    """The lowest error that both reach."""
    return max(one.lowest, other.lowest)


def progress_ratio(
    fast: ErrorCurve, slow: ErrorCurve, axis: Axis, last: float, first: float = math.inf
) -> float | None:
    """How many times the progress of `slow` a unit of the axis is worth to `fast`, in one stage.

    (x_slow(last) − x_slow(first)) / (x_fast(last) − x_fast(first)): 1.3 is 30 % more progress an iteration,
    a case or a second. The stage goes from error `first`, or from the start of the runs, to error `last`.

    Returns:
        None if one of them does not reach `last`, or begins below it or below a finite `first`.
    """
    lengths = []
    for curve in (fast, slow):
        if math.isfinite(first) and curve.error[0] < first:
            return None
        begin, end = curve.reaches(axis, first), curve.reaches(axis, last)
        if begin is None or end is None or end <= begin:
            return None
        lengths.append(end - begin)
    return lengths[1] / lengths[0]


def batch_exponent(
    large: ErrorCurve, small: ErrorCurve, batch_ratio: float, last: float, first: float = math.inf
) -> float | None:
    """p = log(progress_ratio an iteration) / log(m_large / m_small): progress is proportional to mᵖ.

    p > 1 is super-linear: the larger mini-batch needs fewer cases for the stage, as the ratio of cases is
    (m_large / m_small)^(1 − p). p = 1 is linear, the same cases; p = 0 is no gain at all.
    """
    ratio = progress_ratio(large, small, "iteration", last, first)
    return None if ratio is None else math.log(ratio) / math.log(batch_ratio)
