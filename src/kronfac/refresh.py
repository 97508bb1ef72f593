"""A refresh of the inverse: damped inverses for all candidates for γ, at once or in the background.

In the background they are computed beside the training, from the factors of the iteration that starts the
refresh, and are used from an iteration on that is fixed when it starts: never "when ready", so that a run
does not depend on how fast the machine is. A step that comes to it earlier waits.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.factors import KroneckerFactors
from kronfac.inverses import ApproximateInverse, DampedInverse
from kronfac.inverses.base import pack
from kronfac.linalg import in_background

Failure = NonFiniteError | NotPositiveDefiniteError
Outcome = DampedInverse | Failure


@dataclass(frozen=True, eq=False)
class Refresh:
    """Under way, or to be computed when it is asked for."""

    iteration: int
    """Of the factors."""
    adoption: int
    """The iteration that makes the first step with it."""
    lambda_: float
    """When it started."""
    candidates: tuple[float, ...]
    """γ."""
    outcomes: Callable[[], Iterator[Outcome]]
    """The inverse for each candidate, or why there is none."""


def refresh(
    inverse: ApproximateInverse,
    factors: KroneckerFactors,
    candidates: tuple[float, ...],
    iteration: int,
    lag: int,
    lambda_: float,
) -> Refresh:
    """Started in the background, for iteration + lag; without a lag, computed one by one as it is used."""

    def compute() -> Iterator[Outcome]:
        return _outcomes(inverse, factors, candidates)

    outcomes = compute if lag == 0 else _Beside(compute, factors)
    return Refresh(iteration, iteration + lag, lambda_, candidates, outcomes)


def _outcomes(
    inverse: ApproximateInverse, factors: KroneckerFactors, candidates: tuple[float, ...]
) -> Iterator[Outcome]:
    prepared = None
    for gamma in candidates:
        try:
            prepared = prepared or inverse.prepare(factors)
            yield prepared.damped(gamma)
        except (NonFiniteError, NotPositiveDefiniteError) as failure:
            yield failure


class _Beside:
    """Outcomes of a computation in a thread, and on a GPU in a stream, of its own."""

    def __init__(self, compute: Callable[[], Iterator[Outcome]], factors: KroneckerFactors) -> None:
        self._device = factors.A[0].device
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)
            stream.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in _tensors(factors):
                tensor.record_stream(stream)

        def work() -> list[Outcome]:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                outcomes = list(compute())
                if stream is not None:
                    stream.synchronize()  # of this thread alone: what is ready is ready for all
            return outcomes

        self._future: Future[list[Outcome]] = in_background(work)

    def __call__(self) -> Iterator[Outcome]:
        for outcome in self._future.result():
            if self._device.type == "cuda":
                for tensor in _tensors(outcome):  # or its memory could be given away while in use
                    tensor.record_stream(torch.cuda.current_stream(self._device))
            yield outcome


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
            for outcome in refresh.outcomes()
        ],
    }


def unpacked(saved: dict[str, Any], inverse: ApproximateInverse) -> Refresh:
    """What `packed` made plain."""
    outcomes: list[Outcome] = [
        NotPositiveDefiniteError(item) if isinstance(item, str) else inverse.load(item)
        for item in saved["inverses"]
    ]
    return Refresh(
        iteration=int(saved["iteration"]),
        adoption=int(saved["adoption"]),
        lambda_=float(saved["lambda_"]),
        candidates=tuple(saved["candidates"]),
        outcomes=lambda: iter(outcomes),
    )
