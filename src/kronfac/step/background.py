"""Damped inverses for all candidates for γ, computed at once or in the background.

In the background they are computed beside the training, from the factors of the iteration that starts the
refresh, and are used from an iteration on that is fixed when it starts: never "when ready", so that a run
does not depend on how fast the machine is. A step that comes to it earlier waits.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeVar, cast

import torch
from torch import Tensor

from kronfac.curvature import ApproximateInverse, Curvature, DampedInverse
from kronfac.curvature.inverse import (
    Failed,
    Piece,
    PreparedInverse,
    length_of,
    without_unusable,
)
from kronfac.distributed import World
from kronfac.errors import (
    MemoryExhaustedError,
    NonFiniteError,
    NotPositiveDefiniteError,
    out_of_memory,
)
from kronfac.linalg import Failure, in_background
from kronfac.storage import Storable, Unpacker, pack, tensors_in

T = TypeVar("T")
Outcome = DampedInverse | Failure
_FAILURES = (NonFiniteError, NotPositiveDefiniteError)


class Outcomes:
    """The inverse for each candidate, or why there is none."""

    def begin(self) -> None:
        """Compute them in the background; once is enough."""

    def give_up(self) -> None:
        """They are not wanted any more."""

    def __iter__(self) -> Iterator[Outcome]:
        """In the order of the candidates."""
        raise NotImplementedError


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


class Computed(Outcomes):
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


class ComputedByRanks(Outcomes):
    """Outcomes of which every rank computes those of its own units and receives the others'.

    So all ranks have the same inverse to the last bit, which they would not if each had computed all of it.

    Args:
        inverse: how the curvature is inverted.
        curvature: the same on all ranks.
        candidates: the γ's.
        world: the ranks.
    """

    def __init__(
        self,
        inverse: ApproximateInverse,
        curvature: Curvature,
        candidates: tuple[float, ...],
        world: World,
    ) -> None:
        self._world, self._candidates = world, candidates
        held = tensors_in(curvature)  # none if all units are left as they are
        self._device = held[0].device if held else torch.device("cpu")
        owners = _owners(curvature, world)
        self._units = [
            [n for n, owner in enumerate(owners) if owner == rank] for rank in range(world.size)
        ]
        """The units of every rank."""
        own = self._units[world.rank]
        self._own: Computed | None = None
        if own:
            part = curvature.of_units(own)
            self._own = Computed(inverse, part, candidates)

    def begin(self) -> None:
        """Compute this rank's part in the background."""
        if self._own is not None:
            self._own.begin()

    def give_up(self) -> None:
        """Not to be begun any more."""
        if self._own is not None:
            self._own.give_up()

    def __iter__(self) -> Iterator[Outcome]:
        outcomes = iter(()) if self._own is None else iter(self._own)
        for _ in self._candidates:
            yield self._exchange(self._pieces(next(outcomes, None)))

    def _pieces(self, outcome: Outcome | None) -> Sequence[Piece]:
        """This rank's inverses, or why there is none."""
        if outcome is None:
            return ()
        if isinstance(outcome, Failure):
            return [Failed(str(outcome)) for _ in self._units[self._world.rank]]
        return without_unusable(outcome.pieces)

    def _exchange(self, own: Sequence[Piece]) -> DampedInverse:
        """The inverse with the pieces of all ranks."""
        packed = [pack(piece) for piece in own]
        pieces: dict[int, Piece] = {}
        for units, received in zip(
            self._units, self._world.exchange(packed, self._device, "refresh"), strict=True
        ):
            unpacker, start = Unpacker(self._device), 0
            for item in received:
                piece = cast(Piece, unpacker.unpack(Storable, item))
                pieces[units[start]] = piece
                start += length_of(piece)
        return DampedInverse(tuple(pieces[n] for n in sorted(pieces)))


def _owners(curvature: Curvature, world: World) -> list[int]:
    """The rank that inverts each unit; units of a chain are inverted together."""
    chains: list[list[int]] = []
    for n in range(len(curvature.blocks)):
        if n > 0 and curvature.links and curvature.links[n - 1] is not None:
            chains[-1].append(n)
        else:
            chains.append([n])
    costs = [sum(map(_cost, tensors_in([curvature.blocks[n] for n in c]))) for c in chains]
    owners = [0] * len(curvature.blocks)
    for chain, rank in zip(chains, world.assign(costs), strict=True):
        for n in chain:
            owners[n] = rank
    return owners


def _cost(M: Tensor) -> float:
    """Multiplications of an inverse, up to a factor: n³ for a matrix, else the number of elements."""
    square = M.dim() > 1 and M.shape[-1] == M.shape[-2]
    return float(M.numel() * (M.shape[-1] if square else 1))


def prepare(inverse: ApproximateInverse, curvature: Curvature, world: World) -> PreparedInverse:
    """The part of an inverse that all γ share; with several ranks each inverts some of the units."""
    if world.size == 1:
        return inverse.prepare(curvature)
    return _PreparedByRanks(inverse, curvature, world)


@dataclass(frozen=True)
class _PreparedByRanks:
    inverse: ApproximateInverse
    curvature: Curvature
    world: World

    def damped(self, gamma: float) -> DampedInverse:
        (outcome,) = ComputedByRanks(self.inverse, self.curvature, (gamma,), self.world)
        assert isinstance(outcome, DampedInverse)
        return outcome


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
