"""What is kept of a run on a network."""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Phase = Literal["tune", "race"]
Measure = Literal["training loss", "validation loss", "validation metric"]
MEASURES: dict[Measure, int] = {
    "training loss": 3,
    "validation loss": 4,
    "validation metric": 5,
}
"""Their column in a row."""
STEP, EXAMPLES, SECONDS = 0, 1, 2


@dataclass(frozen=True)
class NetworkTrial:
    """A run that ended."""

    problem: str
    optimizer: str
    phase: Phase
    lr: float | None
    seed: int
    limit: float
    batch: int
    rows: list[list[float]]
    """Step, examples, seconds, training loss, validation loss and metric of each evaluation."""
    message: str = ""
    """Why it ended before its time."""

    @property
    def key(self) -> tuple[object, ...]:
        """What it is found by."""
        return self.problem, self.optimizer, self.phase, self.lr, self.seed

    def column(self, index: int) -> npt.NDArray[np.float64]:
        """A number of every row."""
        return np.array([row[index] for row in self.rows], dtype=np.float64)

    @property
    def steps(self) -> int:
        """Steps at the last evaluation."""
        return int(self.rows[-1][STEP]) if self.rows else 0

    def last(self, measure: Measure) -> float:
        """At the end; ∞ for a run that failed."""
        return math.inf if self.message or not self.rows else self.rows[-1][MEASURES[measure]]

    def best(self, measure: Measure) -> float:
        """The lowest of all evaluations; ∞ for a run without any."""
        return min((row[MEASURES[measure]] for row in self.rows), default=math.inf)

    def reaches(self, measure: Measure, target: float, axis: int) -> float | None:
        """Where on the axis, `STEP` or `SECONDS`, the measure is at the target for the first time.

        Linear between two evaluations; None if it never gets there.
        """
        values, places = self.column(MEASURES[measure]), self.column(axis)
        below = np.flatnonzero(values <= target)
        if not len(below):
            return None
        k = int(below[0])
        if k == 0:
            return float(places[0])
        share = (values[k - 1] - target) / (values[k - 1] - values[k])
        return float(places[k - 1] + share * (places[k] - places[k - 1]))
