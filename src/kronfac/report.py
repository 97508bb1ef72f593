"""What one step did, in numbers and events, and how it is shown: warnings, loggers, TensorBoard and others.

No library for watching runs is imported: what `log_to` logs to is known by its methods.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

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
    """Why a step was refused: a gradient is not finite."""
    NONFINITE_STATISTICS = "nonfinite_statistics"
    """Why a step was refused: statistics are not finite."""
    NONFINITE_STEP = "nonfinite_step"
    """Why a step was refused: the step, or what the quadratic model predicts of it, is not finite."""
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
    """ρ of the step before this one, with h on this mini-batch, from which that step was not computed."""
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
SETTLING = 20
"""Rejections in so many first iterations do not count: they find λ, which may start decades off."""
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
"""Advice on rejected steps, by the cause."""

LOGGER = logging.getLogger("kronfac")
_LOUD = {
    EventKind.REFRESH_FAILED,
    EventKind.BLOCK_FAILED,
    EventKind.BLOCK_PLAIN,
    EventKind.OUT_OF_MEMORY,
}
"""Kinds that are logged as warnings; all others are logged as information."""


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
        self._rejected.append(report.rejected and report.iteration > SETTLING)
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


NUMBERS = (
    "loss", "lambda_", "gamma", "alpha", "mu", "rho", "next_rho", "predicted_change", "examples",
    "mean_loss", "memory", "trials",
)  # fmt: skip
"""Fields of a report that are logged, if the step has computed them."""

Log = Callable[[dict[str, float], int], object]
"""Takes numbers by name, and the iteration."""


def log_to(
    optimizer: torch.optim.Optimizer, target: Any, *, prefix: str = "kfac/"
) -> RemovableHandle:
    """Log `optimizer.report` after every step; `handle.remove()` ends that.

    Numbers that are not finite, or that the step did not compute, are left out. `refused` and `rejected`
    are 1 or 0, and `seconds` is the sum over the parts of the step.

    Example:
        >>> from kronfac import KFAC
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = KFAC(model, torch.nn.MSELoss())
        >>> history = []
        >>> handle = log_to(optimizer, lambda numbers, step: history.append(numbers["kfac/loss"]))
        >>> _ = optimizer.step(optimizer.closure(torch.randn(8, 2), torch.randn(8, 1)))
        >>> len(history)
        1

    Args:
        optimizer: a `KFAC`.
        target: one of

            - a TensorBoard `SummaryWriter`: its `add_scalar` is called for every number;
            - a Weights & Biases run, or the module `wandb`: its `log(numbers, step=iteration)` is called
              (tested with an object that has this method, not with the library);
            - a `logging.Logger`: a line with all numbers at level INFO;
            - a function of numbers by name and the iteration, such as `mlflow.log_metrics`, or
              `log_metrics` of a Lightning logger.
        prefix: put before every name.

    Raises:
        TypeError: the optimizer has no report, or the target is none of these.
    """
    if not hasattr(optimizer, "report") or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "kronfac.log_to logs the report of a KFAC: log_to(optimizer, target); got a "
            f"{type(optimizer).__name__} as its optimizer."
        )
    log, last = _log_of(target), optimizer.report

    def after_step(optimizer: Any, args: object, kwargs: object) -> None:
        nonlocal last
        report: StepReport | None = optimizer.report
        if report is None or report is last:  # there was nothing to take a step from
            return
        last = report
        log({prefix + name: value for name, value in numbers_of(report).items()}, report.iteration)

    return optimizer.register_step_post_hook(after_step)


def numbers_of(report: StepReport) -> dict[str, float]:
    """The finite numbers of a report, by name."""
    named: dict[str, float | None] = {
        name.removesuffix("_"): getattr(report, name) for name in NUMBERS
    }
    named["seconds"] = sum(report.seconds.values())
    named["refused"], named["rejected"] = float(report.refused), float(report.rejected)
    return {
        name: float(value)
        for name, value in named.items()
        if value is not None and math.isfinite(value)
    }


def _log_of(target: Any) -> Log:
    """How a target takes numbers."""
    if isinstance(target, logging.Logger):
        return lambda numbers, step: target.info("step %d: %s", step, _line(numbers))
    if callable(getattr(target, "add_scalar", None)):

        def add_scalars(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                target.add_scalar(name, value, step)

        return add_scalars
    if callable(getattr(target, "log", None)):
        return lambda numbers, step: target.log(numbers, step=step)
    if callable(target):
        log: Log = target
        return log
    raise TypeError(
        "kronfac.log_to's target is a SummaryWriter, a run with log(), a logging.Logger, or a function of "
        f"numbers and step; got a {type(target).__name__}."
    )


def _line(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())


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
