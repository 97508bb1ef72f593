"""A refresh of the inverse: damped inverses for all candidates for γ, at once or in the background.

In the background they are computed beside the training, from the factors of the iteration that starts the
refresh, and are used from an iteration on that is fixed when it starts: never "when ready", so that a run
does not depend on how fast the machine is. A step that comes to it earlier waits.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol, TypeVar

import torch

from kronfac.curvature import ApproximateInverse, Curvature, DampedInverse
from kronfac.distributed import Phase
from kronfac.errors import (
    MemoryExhaustedError,
    NonFiniteError,
    NotPositiveDefiniteError,
    out_of_memory,
)
from kronfac.linalg import Failure, in_background
from kronfac.ranges import Count, NotNegative, Positive
from kronfac.storage import tensors_in

T = TypeVar("T")
Outcome = DampedInverse | Failure
_FAILURES = (NonFiniteError, NotPositiveDefiniteError)


class Outcomes(Protocol):
    """The inverse for each candidate, or why there is none."""

    def begin(self) -> None:
        """Compute them in the background; once is enough."""
        ...

    def give_up(self) -> None:
        """They are not wanted any more."""
        ...

    def __iter__(self) -> Iterator[Outcome]:
        """In the order of the candidates."""
        ...


@dataclass(frozen=True, eq=False)
class Refresh:
    """One refresh of the inverse: to be computed, under way or done."""

    iteration: int
    """Iteration of the factors that it is computed from."""
    adoption: int
    """The iteration that makes the first step with it."""
    lambda_: float
    """λ when it started."""
    candidates: tuple[float, ...]
    """The γ's to be tried."""
    outcomes: Outcomes


class Computed:
    """Outcomes that are computed when they are asked for, unless that was begun before."""

    def __init__(
        self, inverse: ApproximateInverse, curvature: Curvature, candidates: tuple[float, ...]
    ) -> None:
        self._inverse, self._curvature, self._candidates = inverse, curvature, candidates
        held = tensors_in(curvature)  # none if a rank has but units that are left as they are
        self._device = held[0].device if held else torch.device("cpu")
        self._future: Future[list[Outcome]] | None = None
        self._process = os.getpid()

    def begin(self) -> None:
        """In a thread, and on a GPU in a stream, of its own."""
        if self._future is None:
            self._future = in_background(self._work(_side_stream(self._device)))

    def give_up(self) -> None:
        """Not to be begun any more; what is under way goes on to its end."""
        if self._future is not None:
            self._future.cancel()

    def __iter__(self) -> Iterator[Outcome]:
        done = self._done()
        if done is None:
            return self._compute()  # as it is: a loop here would hold one while the next is made
        if self._device.type == "cuda":
            for tensor in tensors_in(done):  # or its memory could be given away while in use
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return iter(done)

    def _done(self) -> list[Outcome] | None:
        """What the background found; None if it can't tell, and they have to be computed here."""
        # A forked process has the future and not its thread.
        if self._future is None or self._process != os.getpid():
            return None
        try:
            done = self._future.result()
        except Exception:  # a step can be tried again
            return None
        # Beside the training there may be no memory that there is after it.
        return None if any(isinstance(o, MemoryExhaustedError) for o in done) else done

    def _compute(self) -> Iterator[Outcome]:
        """One at a time, so that memory need not hold them all."""
        prepared = _attempt(lambda: self._inverse.prepare(self._curvature))
        for gamma in self._candidates:
            if isinstance(prepared, Failure):
                yield prepared
            else:
                yield _attempt(partial(prepared.damped, gamma))

    def _work(self, stream: torch.cuda.Stream | None) -> Callable[[], list[Outcome]]:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in tensors_in(self._curvature):
                tensor.record_stream(stream)

        def work() -> list[Outcome]:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                outcomes = list(self._compute())
                if stream is not None:
                    stream.synchronize()  # of this thread alone: what is ready is ready for all
            return outcomes

        return work


@dataclass(frozen=True)
class _Loaded:
    """Outcomes from a file."""

    outcomes: list[Outcome]

    def begin(self) -> None:
        pass

    def give_up(self) -> None:
        pass

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)


def _attempt(compute: Callable[[], T]) -> T | Failure:
    try:
        return compute()
    except _FAILURES as failure:
        return failure.with_traceback(None)  # which holds what it was computed from
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        said = str(error).strip().splitlines() or ["MemoryError"]
        return MemoryExhaustedError(f"There is no memory for the inverse: {said[0]}")


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """One stream per device: torch keeps memory for every stream there ever was."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


# --------------------------------------------------------------------------------------------- saving


@dataclass(frozen=True)
class SavedRefresh:
    """A refresh with its outcomes, which can be saved."""

    iteration: Count
    adoption: Count
    lambda_: NotNegative
    candidates: tuple[Positive, ...]
    inverses: tuple[DampedInverse | str, ...]
    """Or why there is none."""

    def __post_init__(self) -> None:
        if self.adoption < self.iteration:
            raise ValueError(
                f"it must be adopted at its iteration {self.iteration} or later; got {self.adoption}."
            )
        if not len(self.candidates) == len(self.inverses) > 0:
            raise ValueError(
                f"it must have an outcome for each candidate; got {len(self.inverses)} outcomes for "
                f"{len(self.candidates)} candidates."
            )

    @classmethod
    def of(cls, refresh: Refresh) -> "SavedRefresh":
        """Waits for the outcomes, which are whole."""
        outcomes = tuple(
            str(o) if isinstance(o, Exception) else o.gathered(Phase.STATE, on_host=True)
            for o in refresh.outcomes
        )
        numbers = refresh.iteration, refresh.adoption, refresh.lambda_, refresh.candidates
        return cls(*numbers, outcomes)

    @property
    def finished(self) -> list[DampedInverse]:
        """The inverses that there are."""
        return [inverse for inverse in self.inverses if not isinstance(inverse, str)]

    def restored(self) -> Refresh:
        """The refresh, done."""
        outcomes: list[Outcome] = [
            NotPositiveDefiniteError(o) if isinstance(o, str) else o for o in self.inverses
        ]
        numbers = self.iteration, self.adoption, self.lambda_, self.candidates
        return Refresh(*numbers, _Loaded(outcomes))
