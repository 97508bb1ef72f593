"""A refresh of the inverse in which every rank inverts some of the blocks, and gets the others.

Units are given to ranks by what their inverse costs, the dearest first, each to the rank that has least to
do so far; a chain goes to one rank as a whole. So the inverse is the same on all ranks to the last bit,
which one that every rank had computed for itself would not be.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from kronfac.assignment import assign
from kronfac.curvature import ApproximateInverse, Curvature, DampedInverse
from kronfac.curvature.inverse import ChainOperator, Piece, PreparedInverse, failed
from kronfac.distributed import Part, Phase, Ranks
from kronfac.linalg import Failure
from kronfac.refresh import Computed, Outcome
from kronfac.storage import Storable, Unpacker, pack, tensors_in

_TENSOR = "tensor"


def prepare_over_ranks(
    inverse: ApproximateInverse, curvature: Curvature, world: Ranks
) -> PreparedInverse:
    """What every γ shares, with the work divided if there are several ranks."""
    return inverse.prepare(curvature) if world.size == 1 else _Prepared(inverse, curvature, world)


@dataclass(frozen=True)
class _Prepared:
    inverse: ApproximateInverse
    curvature: Curvature
    world: Ranks

    def damped(self, gamma: float) -> DampedInverse:
        (outcome,) = Divided(self.inverse, self.curvature, (gamma,), self.world)
        assert isinstance(outcome, DampedInverse)
        return outcome


class Divided:
    """Outcomes of which every rank computes its part, and which are put together when asked for."""

    def __init__(
        self,
        inverse: ApproximateInverse,
        curvature: Curvature,
        candidates: tuple[float, ...],
        world: Ranks,
    ) -> None:
        self._world, self._curvature = world, curvature
        owners = owners_of(curvature, world.size)
        self._owned = [
            [n for n, owner in enumerate(owners) if owner == r] for r in range(world.size)
        ]
        own = self._owned[world.rank]
        self._candidates = candidates
        self._own: Computed | None = None
        if own:
            part = curvature.of_units(own)
            self._own = Computed(inverse.of_units(own), part, candidates)

    def begin(self) -> None:
        """Compute this rank's part in the background."""
        if self._own is not None:
            self._own.begin()

    def give_up(self) -> None:
        """The part is not wanted any more."""
        if self._own is not None:
            self._own.give_up()

    def __iter__(self) -> Iterator[Outcome]:
        mine = iter(()) if self._own is None else iter(self._own)
        for _ in self._candidates:
            outcome = next(mine, None)
            yield self._put_together(self._pieces(outcome))

    def _pieces(self, outcome: Outcome | None) -> Sequence[Piece]:
        """This rank's inverses, or why there is none."""
        if outcome is None:
            return ()
        if isinstance(outcome, Failure):
            return [failed(outcome) for _ in self._owned[self._world.rank]]
        return outcome.pieces

    def _put_together(self, own: Sequence[Piece]) -> DampedInverse:
        device = tensors_in(self._curvature)[0].device
        described = json.dumps([_describe(pack(piece)) for piece in own])
        texts = self._world.texts(Phase.REFRESH, described)
        found = [_Received(json.loads(text), device) for text in texts]
        # As the others get it: the layout of its memory decides how a product is rounded.
        for to, made in zip(found[self._world.rank].parts, tensors_in(list(own)), strict=True):
            to.tensor.copy_(made)
        self._world.gather(Phase.REFRESH, [])  # all ranks have the memory for it
        pieces: dict[int, Piece] = {}
        for rank, (theirs, numbers) in enumerate(zip(found, self._owned, strict=True)):
            self._world.broadcast_(Phase.REFRESH, theirs.parts, rank)
            place = 0
            for piece in theirs.pieces:
                pieces[numbers[place]] = piece
                place += piece.length if isinstance(piece, ChainOperator) else 1
        return DampedInverse(tuple(pieces[n] for n in sorted(pieces)))


def owners_of(curvature: Curvature, ranks: int) -> list[int]:
    """The rank that inverts each unit."""
    chains: list[list[int]] = []
    for n in range(len(curvature.blocks)):
        linked = n > 0 and bool(curvature.links) and curvature.links[n - 1] is not None
        if linked:
            chains[-1].append(n)
        else:
            chains.append([n])
    costs = [sum(map(_cost, tensors_in([curvature.blocks[n] for n in c]))) for c in chains]
    owners = [0] * len(curvature.blocks)
    for chain, rank in zip(chains, assign(costs, ranks), strict=True):
        for n in chain:
            owners[n] = rank
    return owners


def _cost(M: Tensor) -> float:
    """Multiplications of an inverse, but for a factor: those of n³ for a matrix, of its numbers else."""
    square = M.dim() > 1 and M.shape[-1] == M.shape[-2]
    return float(M.numel() * (M.shape[-1] if square else 1))


def _describe(packed: Any) -> Any:
    """What `pack` made, with what there is to know of it in the place of every tensor."""
    if isinstance(packed, Tensor):
        square = packed.dim() > 1 and packed.shape[-1] == packed.shape[-2]
        symmetric = square and bool((packed == packed.mT).all())
        dtype = str(packed.dtype).removeprefix("torch.")
        return {_TENSOR: list(packed.shape), "dtype": dtype, "symmetric": symmetric}
    if isinstance(packed, dict):
        return {key: _describe(item) for key, item in packed.items()}
    return [_describe(item) for item in packed] if isinstance(packed, list) else packed


class _Received:
    """Inverses of described kinds and shapes, to be filled in; symmetric matrices travel packed."""

    def __init__(self, described: Sequence[Any], device: torch.device) -> None:
        self._device = device
        self._symmetric: list[bool] = []
        unpacker = Unpacker(device)
        packed = [
            self._empty(item) for item in described
        ]  # all at once: tensors go by their identity
        self.pieces = [cast(Piece, unpacker.unpack(Storable, item)) for item in packed]
        tensors = tensors_in(self.pieces)
        self.parts = [Part(*pair) for pair in zip(tensors, self._symmetric, strict=True)]

    def _empty(self, item: Any) -> Any:
        """What `pack` would make, with zeros in all tensors."""
        if isinstance(item, dict) and _TENSOR in item:
            self._symmetric.append(item["symmetric"])
            dtype = getattr(torch, item["dtype"])
            return torch.zeros(item[_TENSOR], dtype=dtype, device=self._device)
        if isinstance(item, dict):
            return {key: self._empty(value) for key, value in item.items()}
        return [self._empty(value) for value in item] if isinstance(item, list) else item
