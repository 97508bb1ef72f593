"""One run of an optimizer from a seed's start, and what is kept of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kronfac_experiments.bench.race.peers import BY_NOISE, GROWING, Peer, Point
from kronfac_experiments.config import DEFAULT_BATCH, TrainConfig, resolved
from kronfac_experiments.error_curve import ErrorCurve
from kronfac_experiments.optimizers import TrainingFailedError
from kronfac_experiments.session import Session, step_or_explain
from kronfac_experiments.task import Cases, Task

Phase = Literal["tune", "race"]
FIRST_MARKS = 200
"""The first evaluations are this part of the limit apart, later ones 5 %: about 65 of them."""
SPACING = 1.05
AVERAGE_FROM = 1
"""Everyone's iterates are averaged, as [MG15 §13] does for both of its methods: first-order methods with a
constant learning rate gain most from it."""


@dataclass(frozen=True)
class Entry:
    """What one run is to be.

    Args:
        peer: Who.
        point: A point of its grid.
        seed: Seed of parameters and mini-batches.
        limit: Seconds of optimiser time.
        until: The run ends at this error.
        evaluation_cases: The first training cases, for the error.
        threads: CPU threads of a process of its own; others have what torch has.
    """

    peer: Peer
    point: Point
    seed: int
    limit: float
    until: float
    evaluation_cases: int
    threads: int


@dataclass(frozen=True)
class Trial:
    """A run that ended."""

    problem: str
    optimizer: str
    phase: Phase
    point: dict[str, float]
    seed: int
    limit: float
    rows: list[list[float]]
    """Iteration, cases, seconds and error of each evaluation."""
    message: str = ""
    """Why it ended before its time: it diverged, or raised an error."""

    @property
    def key(self) -> tuple[object, ...]:
        """What it is found by."""
        point = tuple(sorted(self.point.items()))
        return self.problem, self.optimizer, self.phase, point, self.seed

    @property
    def curve(self) -> ErrorCurve:
        """Its evaluations."""
        columns = np.array(self.rows, dtype=np.float64).reshape(-1, 4).T
        iteration, cases, seconds, error = columns
        return ErrorCurve(iteration, cases, seconds, error, diverged=bool(self.message))

    def rank(self, target: float) -> tuple[int, float]:
        """To choose by: when it reached the target, else the error at the limit; failures last."""
        if self.message or not self.rows:
            return (2, 0.0)
        seconds = self.curve.reaches("seconds", target)
        if seconds is not None and seconds <= self.limit:
            return (0, seconds)
        error = self.curve.at("seconds", self.limit)  # a step may have ended after it
        return (1, self.curve.last if error is None else error)


Record = Callable[[list[list[float]], float], None]
"""Called with the rows so far and the seconds of optimiser time since the last call."""


def marks(limit: float) -> list[float]:
    """Seconds of optimiser time at which the error is evaluated; the last is the limit."""
    times, step = [0.0], limit / FIRST_MARKS
    while times[-1] < limit:
        times.append(min(limit, max(times[-1] + step, times[-1] * SPACING)))
    return times[1:]


def batch_of(point: Point) -> int | Literal["adaptive", "paper"]:
    """The mini-batch of a point."""
    batch = point.get("batch", DEFAULT_BATCH)
    if batch == BY_NOISE:
        return "adaptive"
    return "paper" if batch == GROWING else int(batch)


def run_here(
    entry: Entry, task: Task, tick: Callable[[float], None]
) -> tuple[list[list[float]], str]:
    """Run in this process, by a `Session`; rows, and why it ended early.

    Args:
        entry: What to run.
        task: In float32 on the CPU.
        tick: Called with the seconds of every step.
    """
    batch = batch_of(entry.point)
    config = TrainConfig(
        problem=task.name,
        batch=min(batch, len(task.train)) if isinstance(batch, int) else batch,
        seed=entry.seed,
        average=AVERAGE_FROM,
    )
    config = resolved(config, cases=len(task.train), weight_decay=task.weight_decay)
    session = Session(config, task, entry.peer.maker(entry.point))
    sample = task.train.first(entry.evaluation_cases)
    times = marks(entry.limit)
    rows = [[0.0, 0.0, 0.0, _error(task, session, sample)]]
    try:
        while session.seconds < entry.limit and rows[-1][3] > entry.until:
            before = session.seconds
            step_or_explain(session)
            tick(session.seconds - before)
            if session.seconds >= times[0]:
                times = [time for time in times if time > session.seconds] or [entry.limit]
                rows.append(_row(task, session, sample))
    except TrainingFailedError as failure:
        return rows, str(failure)
    return rows, ""


def _row(task: Task, session: Session, sample: Cases) -> list[float]:
    error = _error(task, session, sample)
    if not np.isfinite(error):
        raise TrainingFailedError(f"Iteration {session.iteration}: the error became {error}.")
    return [session.iteration, session.cases, session.seconds, error]


def _error(task: Task, session: Session, sample: Cases) -> float:
    """The smaller one of current and averaged parameters."""
    error = task.error(session.model, sample)
    if session.average is None or not session.iteration:
        return error
    return float(np.fmin(error, task.error(session.average, sample)))
