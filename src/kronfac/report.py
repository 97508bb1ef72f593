"""What one step did, in numbers and events."""

import logging
import time
import warnings
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch.autograd.profiler import record_function

from kronfac.interrupts import poll
from kronfac.warn import warn

_RENAMED = {"taken_back": "rejected"}
"""Kinds of events by their names in the release before."""


class EventKind(str, Enum):
    """What an event is about; equal to the string of its value.

    `"taken_back"`, the name of `REJECTED` in the release before, still works: `EventKind("taken_back")`,
    `event.kind == "taken_back"`.
    """

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
    NO_DATA = "no_data"
    """No gradient came to some layers."""
    DEAD_UNITS = "dead_units"
    """Outputs of layers that no gradient comes to, as of a ReLU that is always 0."""
    CONSTANT_INPUTS = "constant_inputs"
    """Inputs of layers that do not vary."""
    BATCH_OF_ONE = "batch_of_one"
    """The mini-batch has one example."""
    ZERO_GRADIENT = "zero_gradient"
    """All gradients are zero."""
    PARAMETERS_CHANGED = "parameters_changed"
    """Somebody else has written to the parameters since the last step."""
    LOSS_NOT_SEEN = "loss_not_seen"
    """The closure returned something else than the loss module's value."""

    @classmethod
    def _missing_(cls, value: object) -> "EventKind | None":
        return cls(_RENAMED[value]) if isinstance(value, str) and value in _RENAMED else None

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, _RENAMED.get(other, other) if isinstance(other, str) else other)

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary that happened in a step."""

    kind: EventKind
    message: str
    advice: str = ""
    """What to do about it, if that is not the same for all events of the kind."""


@dataclass(frozen=True)
class StepReport:
    """The numbers of one step, named as in the paper's pseudocode [MG15 §9].

    Numbers that the step did not compute are None: `rho` between two updates of λ, `mu` without
    momentum, everything after `loss` in a step that was refused.
    """

    iteration: int
    """k, counted from 1; a refused step repeats the number of the one it would have been."""
    loss: float
    """The loss as the closure returned it, without the weight-decay term; NaN if a loop's loss is not
    seen."""
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
    notes: tuple[Event, ...] = ()
    """What is out of the ordinary in data or network, when it begins; nothing went wrong."""

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

    @property
    def cases(self) -> int:
        """Deprecated: `examples`."""
        message = (
            "StepReport.cases is now StepReport.examples; the old name goes with the next release."
        )
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return self.examples


_ADVICE = {
    EventKind.REFUSED: (
        "refused a step",
        "Parameters and state stay as they were. Look for NaN or infinity in the inputs, the targets and "
        "what the model makes of this mini-batch",
    ),
    EventKind.REJECTED: (
        "rejected a step and rolled it back",
        "One now and then is no mistake. If many are, shuffle the examples or take larger mini-batches",
    ),
}
SAME_EXAMPLES = (
    "One now and then is no mistake. This mini-batch does not differ from the last one, so that it is the "
    "quadratic model that failed, and λ is larger from now on. If many are rejected, see to it that KFAC "
    "sees the loss, and use float64 if the loss is near its rounding error"
)
"""Advice with a rejected step if it is no noise between mini-batches that rejected it."""
NOT_ZEROED = (
    "Gradients of earlier steps were added to its own, as an earlier warning says: call "
    "optimizer.zero_grad() before each backward(), or once before several micro-batches"
)
"""The same if gradients were not zeroed."""


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
    for event in (*report.events, *report.notes):
        level = logging.WARNING if event.kind in _LOUD else logging.INFO
        LOGGER.log(level, "iteration %d: %s: %s", report.iteration, event.kind, event.message)


class EventWarnings:
    """Warns of the first step that is refused, and of the first that is rejected."""

    def __init__(self) -> None:
        self._given: set[EventKind] = set()

    def __call__(self, report: StepReport) -> None:
        """Look at what a step did."""
        for event in report.events:
            if event.kind in _ADVICE and event.kind not in self._given:
                self._given.add(event.kind)
                done, advice = _ADVICE[event.kind]
                advice = event.advice or advice
                warn(
                    f"KFAC {done} at iteration {report.iteration}: {event.message} {advice}. Further ones "
                    f"are in optimizer.report.{event.kind} only."
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
        poll()
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
