"""What one step did, in numbers and events."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """Something out of the ordinary that happened in a step."""

    kind: str
    """`"refused"`, `"taken_back"`, `"refresh_failed"`, `"candidate_failed"` or `"loss_not_seen"`."""
    message: str


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
    """The same of the step before this one, with h on this step's rows, which it had not seen."""
    predicted_change: float | None = None
    """M(δ) − M(0)."""
    cases: int = 0
    """Rows of the mini-batch S′."""
    mean_loss: float | None = None
    """`loss`; of one that is summed over the cases the mean."""
    memory: float = 1.0
    """Steps that momentum remembers where mini-batches are noisy; 1 is the last one alone."""
    trials: int = 0
    """Trial evaluations of the mini-batch, at the first step, to find λ₀."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Wall-clock time by part. On an accelerator, work is queued: only the sum means something."""
    events: tuple[Event, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the step was refused: none was made from this mini-batch.

        Parameters and statistics are as they were, but for a step before it that was taken back.
        """
        return any(event.kind == "refused" for event in self.events)


class Stopwatch:
    """Seconds by part of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Add the time spent inside this context to `part`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[part] = self.seconds.get(part, 0.0) + spent
