"""A refresh of the inverse: damped inverses for all candidates for γ, at once or in the background.

In the background they are computed beside the training, from the factors of the iteration that starts the
refresh, and are used from an iteration on that is fixed when it starts: never "when ready", so that a run
does not depend on how fast the machine is. A step that comes to it earlier waits.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.factors import KroneckerFactors
from kronfac.inverses import ApproximateInverse, DampedInverse
from kronfac.inverses.base import pack
from kronfac.linalg import in_background

T = TypeVar("T")
Failure = NonFiniteError | NotPositiveDefiniteError
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
    """To be computed, under way or done."""

    iteration: int
    """Of the factors."""
    adoption: int
    """The iteration that makes the first step with it."""
    lambda_: float
    """When it started."""
    candidates: tuple[float, ...]
    """γ."""
    outcomes: Outcomes


class Computed:
    """Outcomes that are computed when they are asked for, unless that was begun before."""

    def __init__(
        self, inverse: ApproximateInverse, factors: KroneckerFactors, candidates: tuple[float, ...]
    ) -> None:
        self._inverse, self._factors, self._candidates = inverse, factors, candidates
        self._device = factors.A[0].device
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
            return self._computed()  # as it is: a loop here would hold one while the next is made
        if self._device.type == "cuda":
            for tensor in _tensors(done):  # or its memory could be given away while in use
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return iter(done)

    def _done(self) -> list[Outcome] | None:
        """What the background found; None if it can't tell, and they have to be computed here."""
        # A forked process has the future and not its thread.
        if self._future is None or self._process != os.getpid():
            return None
        try:
            return self._future.result()
        except Exception:  # out of memory, perhaps; a step can be tried again
            return None

    def _computed(self) -> Iterator[Outcome]:
        """One at a time, so that memory need not hold them all."""
        prepared = _tried(lambda: self._inverse.prepare(self._factors))
        for gamma in self._candidates:
            if isinstance(prepared, Failure):
                yield prepared
            else:
                yield _tried(partial(prepared.damped, gamma))

    def _work(self, stream: torch.cuda.Stream | None) -> Callable[[], list[Outcome]]:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in _tensors(self._factors):
                tensor.record_stream(stream)

        def work() -> list[Outcome]:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                outcomes = list(self._computed())
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


def _tried(compute: Callable[[], T]) -> T | Failure:
    try:
        return compute()
    except _FAILURES as failure:
        return failure.with_traceback(None)  # which holds what it was computed from


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """One a device: memory is kept for every stream there ever was."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name))


# --------------------------------------------------------------------------------------------- saving


def packed(refresh: Refresh) -> dict[str, Any]:
    """Plain, for saving; waits for it."""
    return {
        "iteration": refresh.iteration,
        "adoption": refresh.adoption,
        "lambda_": refresh.lambda_,
        "candidates": list(refresh.candidates),
        "inverses": [
            str(outcome) if isinstance(outcome, Exception) else pack(outcome)
            for outcome in refresh.outcomes
        ],
    }


def unpacked(saved: dict[str, Any], inverse: ApproximateInverse) -> Refresh:
    """What `packed` made plain.

    Raises:
        KeyError, TypeError: something is missing.
    """
    outcomes: list[Outcome] = [
        NotPositiveDefiniteError(item) if isinstance(item, str) else inverse.load(item)
        for item in saved["inverses"]
    ]
    return Refresh(
        iteration=int(saved["iteration"]),
        adoption=int(saved["adoption"]),
        lambda_=float(saved["lambda_"]),
        candidates=tuple(saved["candidates"]),
        outcomes=_Loaded(outcomes),
    )
