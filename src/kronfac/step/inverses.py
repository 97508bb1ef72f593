"""Damped inverses for the candidates for γ: at once or in the background, on one process or on several.

In the background they are computed beside the training, from the factors of the iteration that starts the
refresh, and are used from an iteration on that is fixed when it starts: never "when ready", so that a run
does not depend on how fast the machine is. A step that comes to it earlier waits.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cache, partial
from typing import TypeVar

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
from kronfac.storage import pack, tensors_in, unpack

T = TypeVar("T")
Outcome = DampedInverse | Failure
_FAILURES = (NonFiniteError, NotPositiveDefiniteError)


class Inverter:
    """Inverts one curvature with several γ; of several ranks, each inverts some of the units.

    It receives the other units' inverses: so all ranks have the same to the last bit, which they would not
    if each had computed all of it.

    Args:
        inverse: how the curvature is inverted.
        curvature: the same on all ranks.
        world: the ranks.
    """

    def __init__(self, inverse: ApproximateInverse, curvature: Curvature, world: World) -> None:
        self._inverse, self._world = inverse, world
        held = tensors_in(curvature)  # none if all units are left as they are
        self._device = held[0].device if held else torch.device("cpu")
        owners = _owners(curvature, world)
        self._units = [
            [n for n, owner in enumerate(owners) if owner == rank] for rank in range(world.size)
        ]
        """The units of every rank."""
        own = self._units[world.rank]
        self._own = curvature if world.size == 1 else curvature.of_units(own)
        self._prepared: PreparedInverse | Failure | None = None
        self._future: Future[dict[float, Outcome]] | None = None
        self._process = os.getpid()

    def begin(self, candidates: Sequence[float]) -> None:
        """Compute this rank's part in a thread, and on a GPU a stream, of its own; once is enough."""
        if self._future is None:
            self._future = in_background(self._work(candidates, _side_stream(self._device)))

    @property
    def failure(self) -> Failure | None:
        """Why no γ can be inverted with; with several ranks, that shows in the units of one of them."""
        prepared = self._prepare() if self._world.size == 1 else None
        return prepared if isinstance(prepared, Failure) else None

    def damped(self, gamma: float) -> Outcome:
        """The inverse with damping strength γ, or why there is none."""
        done = self._done()
        outcome = self._compute(gamma) if done is None else done[gamma]
        if done is not None and self._device.type == "cuda":
            for tensor in tensors_in(outcome):  # or its memory could be given away while in use
                tensor.record_stream(torch.cuda.current_stream(self._device))
        return outcome if self._world.size == 1 else self._exchange(outcome)

    def _done(self) -> dict[float, Outcome] | None:
        """What the background found; None if it can't tell, and it has to be computed here."""
        # A forked process has the future and not its thread.
        if self._future is None or self._process != os.getpid():
            return None
        try:
            done = self._future.result()
        except Exception:  # a step can be tried again
            return None
        if any(isinstance(o, MemoryExhaustedError) for o in done.values()):
            # Beside the training there may be no memory that there is after it.
            self._future = self._prepared = None
            return None
        return done

    def _compute(self, gamma: float) -> Outcome:
        """The inverse of this rank's units."""
        if not self._own.blocks:
            return DampedInverse(())
        prepared = self._prepare()
        if isinstance(prepared, Failure):
            return prepared
        return _attempt(partial(prepared.damped, gamma))

    def _prepare(self) -> PreparedInverse | Failure:
        if self._prepared is None:
            self._prepared = _attempt(partial(self._inverse.prepare, self._own))
        return self._prepared

    def _work(
        self, candidates: Sequence[float], stream: torch.cuda.Stream | None
    ) -> Callable[[], dict[float, Outcome]]:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            for tensor in tensors_in(self._own):
                tensor.record_stream(stream)

        def work() -> dict[float, Outcome]:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                outcomes = {gamma: self._compute(gamma) for gamma in candidates}
                if stream is not None:
                    stream.synchronize()  # of this thread alone: what is ready is ready for all
            return outcomes

        return work

    def _exchange(self, own: Outcome) -> DampedInverse:
        """The inverse with the pieces of all ranks."""
        if isinstance(own, Failure):
            found: Sequence[Piece] = [Failed(str(own)) for _ in self._units[self._world.rank]]
        else:
            found = without_unusable(own.pieces)
        packed = [pack(piece) for piece in found]
        pieces: dict[int, Piece] = {}
        for units, received in zip(
            self._units, self._world.exchange(packed, self._device, "refresh"), strict=True
        ):
            start = 0
            for item in received:
                piece: Piece = unpack(item, device=self._device)
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
