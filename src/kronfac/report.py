"""What one step did, in numbers and events."""

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.autograd.profiler import record_function

from kronfac.warn import warn


class EventKind(str, Enum):
    """What an event is about; equal to the string of its value."""

    REFUSED = "refused"
    """Loss, gradient or statistics are not finite: no step was made."""
    REJECTED = "rejected"
    """The step before made the objective worse and was rolled back."""
    REFRESH_FAILED = "refresh_failed"
    """No damped inverse could be computed: the last one stays in use."""
    BLOCK_FAILED = "block_failed"
    """The inverse of some units could not be computed: their last good ones stay in use."""
    CANDIDATE_FAILED = "candidate_failed"
    """One γ that was tried could not be inverted with."""
    NONFINITE_LOSS = "nonfinite_loss"
    """Why a step was refused: the loss is NaN or infinite."""
    NONFINITE_GRADIENT = "nonfinite_gradient"
    """The same for a gradient."""
    NONFINITE_STATISTICS = "nonfinite_statistics"
    """The same for the statistics."""
    NONFINITE_STEP = "nonfinite_step"
    """The same for the step, or what the quadratic model predicts of it."""
    BLOCK_DAMPED = "block_damped"
    """Some units have no inverse with γ: they have one with more damping."""
    BLOCK_PLAIN = "block_plain"
    """Some units have no inverse and never had one: the plain gradient is used for them."""
    OUT_OF_MEMORY = "out_of_memory"
    """There was no memory for the inverse with one γ that was tried."""
    LOSS_NOT_SEEN = "loss_not_seen"
    """The closure returned something else than the loss module's value."""

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary that happened in a step."""

    kind: EventKind
    message: str
    advice: str = ""
    """What to do about it."""


@dataclass(frozen=True)
class StepReport:
    """The numbers of one step, named as in the paper's pseudocode [MG15 §9].

    Numbers that the step did not compute are None: `rho` between two updates of λ, `mu` without
    momentum, everything after `loss` in a step that was refused.
    """

    iteration: int
    """k, counted from 1; a refused step repeats the number of the one it would have been."""
    loss: float
    """The loss as the closure returned it, without the weight-decay term."""
    lambda_: float
    """λ after this step."""
    gamma: float
    """γ that the step was made with."""
    alpha: float | None = None
    mu: float | None = None
    rho: float | None = None
    """(h(θ+δ) − h(θ)) / (M(δ) − M(0)) on S′ [MG15 §6.5]."""
    next_rho: float | None = None
    """The same for the step before this one, with h on this mini-batch, from which it was not computed."""
    predicted_change: float | None = None
    """M(δ) − M(0)."""
    examples: int = 0
    """Examples in the mini-batch S′."""
    mean_loss: float | None = None
    """`loss`; if that is summed over the examples, their mean."""
    memory: float = 1.0
    """Steps that momentum remembers while mini-batches are noisy; 1 is the last one alone."""
    trials: int = 0
    """Trial evaluations of the mini-batch, at the first step, to find λ₀."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock time by part. On an accelerator, work is queued: only the sum means something."""
    events: tuple[Event, ...] = ()
    """What went wrong, and what was done about it."""

    @property
    def refused(self) -> bool:
        """Whether the step was refused: none was made from this mini-batch.

        Parameters and statistics are as they were, but for a step before it that was rejected.
        """
        return any(event.kind is EventKind.REFUSED for event in self.events)

    @property
    def rejected(self) -> bool:
        """Whether the step before this one was rejected and rolled back."""
        return any(event.kind is EventKind.REJECTED for event in self.events)


RECENT, MANY = 10, 3
"""So many rejections in so many steps are worth a warning; a few are normal in a good run."""
REJECTED_BY = {
    "noise": (
        "Mini-batches differ by more than a step gains: shuffle the examples, or use larger ones."
    ),
    "model": (
        "The loss rose on the very mini-batch that the step was computed from: check that the model does "
        "not draw random numbers of its own, and that the whole loss is computed where KFAC sees it."
    ),
    "rounding": (
        "The loss changes by little more than its rounding error: train in float64, or stop here."
    ),
    "gradients": (
        "Gradients of earlier steps were added to its own: call optimizer.zero_grad() before each "
        "backward(), or once before several micro-batches."
    ),
}
"""What to do about steps that are rejected, by the cause."""

LOGGER = logging.getLogger("kronfac")
_LOUD = {
    EventKind.REFRESH_FAILED,
    EventKind.BLOCK_FAILED,
    EventKind.BLOCK_PLAIN,
    EventKind.OUT_OF_MEMORY,
}
"""Kinds that are logged as warnings; others, of which some are told by `EventWarnings`, as information."""


def log_events(report: StepReport) -> None:
    """Log what happened in a step to the logger `"kronfac"`."""
    for event in report.events:
        level = logging.WARNING if event.kind in _LOUD else logging.INFO
        LOGGER.log(level, "iteration %d: %s: %s", report.iteration, event.kind, event.message)


class EventWarnings:
    """Warns once of refused steps, at the first, and once of rejected ones, when there are many."""

    def __init__(self) -> None:
        self._given: set[EventKind] = set()
        self._rejected: deque[bool] = deque(maxlen=RECENT)

    def __call__(self, report: StepReport) -> None:
        """Look at what a step did."""
        self._rejected.append(report.rejected)
        for event in report.events:
            if event.kind in self._given:
                continue
            if event.kind is EventKind.REFUSED:
                self._given.add(event.kind)
                warn(
                    f"KFAC refused a step at iteration {report.iteration}: {event.message} Parameters and "
                    "state stay as they were; look for NaN or infinity in the inputs, the targets and the "
                    "model's outputs for this mini-batch."
                )
            if event.kind is EventKind.REJECTED and sum(self._rejected) >= MANY:
                self._given.add(event.kind)
                warn(
                    f"KFAC rejected {sum(self._rejected)} of the last {RECENT} steps, the latest at "
                    f"iteration {report.iteration}. {event.advice}"
                )


class Stopwatch:
    """Seconds by part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, part: str) -> "_Part":
        """Add the time spent inside this context to `part`."""
        return _Part(self.seconds, part)


class _Part:
    """A context of its own rather than a generator's, which a small network's step would notice."""

    def __init__(self, seconds: dict[str, float], part: str) -> None:
        self._seconds, self._part = seconds, part

    def __enter__(self) -> None:
        self._range = None
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            self._range = record_function(f"kronfac.{self._part}")
            self._range.__enter__()
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        spent = time.perf_counter() - self._start
        self._seconds[self._part] = self._seconds.get(self._part, 0.0) + spent
        if self._range is not None:
            self._range.__exit__(None, None, None)
