"""An inverse of which a process holds a part: other products come from the processes that hold the rest.

Every process multiplies by what it holds, and products are exchanged between groups of processes
(`distributed/holders.py`); those of one group compute the same, to the last bit. Pieces go from process to
process as descriptions, of kinds and shapes, and then their tensors.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from kronfac.curvature import DampedInverse
from kronfac.curvature.inverse import Failed, Piece, Placed, Vectors, length_of
from kronfac.distributed import Holders, Part, Phase
from kronfac.errors import RankError
from kronfac.storage import Storable, Unpacker, map_tensors, pack, tensors_in

_TENSOR = "tensor"


@dataclass(frozen=True)
class DividedInverse(DampedInverse):
    """A damped inverse whose pieces are held by groups of processes.

    All processes have what is not `Placed`: failures, and pieces without tensors.
    """

    groups: tuple[int, ...]
    """The group that holds the inverse of each unit, if nothing goes wrong."""
    holders: Holders
    device: torch.device

    def mv(self, vectors: Vectors) -> tuple[Tensor, ...]:
        """The product with a vector in parameter space, in all processes; all of them call it."""
        # What is received is contiguous, and the layout of its memory decides how a sum is rounded.
        products = tuple(U.contiguous() for U in super().mv(vectors))
        parts: list[list[Part]] = [[] for _ in self.holders.groups]
        number = 0
        for piece in self.pieces:
            if isinstance(piece, Placed):
                parts[piece.group] += map(Part, products[number : number + piece.length])
            number += length_of(piece)
        self.holders.world.gather(Phase.DIRECTION, [])  # all ranks have come this far
        self.holders.exchange_(Phase.DIRECTION, parts)
        return products

    def gathered(
        self, phase: Phase, kind: type = object, *, on_host: bool = False
    ) -> DampedInverse:
        """The inverse with all of its pieces, or those of one kind, in every process."""
        holders, world, pieces = self.holders, self.holders.world, list(self.pieces)
        own = {
            n: piece.operator
            for n, piece in enumerate(self.pieces)
            if isinstance(piece, Placed)
            and piece.operator is not None
            and isinstance(piece.operator, kind)
        }
        speaks = world.rank == holders.first_of(holders.own)
        said = {n: describe(pack(operator)) for n, operator in own.items()} if speaks else {}
        told = [json.loads(text) for text in world.texts(phase, json.dumps(said))]
        described = {int(n): item for text in told for n, item in text.items()}
        numbers = sorted(described)
        # On the host one after the other: the memory of the device need not hold all of them.
        for some in [[n] for n in numbers] if on_host else [numbers]:
            parts: dict[int, list[Part]] = {}
            for n in some:
                if n in own:
                    pieces[n] = own[n]
                    pairs = zip(tensors_in(own[n]), symmetric_in(described[n]), strict=True)
                    parts[n] = [Part(*pair) for pair in pairs]
                else:
                    received = Received([described[n]], self.device)
                    (pieces[n],), parts[n] = received.pieces, received.parts
            world.gather(phase, [])  # all ranks have the memory for it
            for n in some:
                placed = self.pieces[n]
                assert isinstance(placed, Placed)
                numbered = range(len(holders.groups))
                holders.exchange_(phase, [parts[n] if g == placed.group else [] for g in numbered])
                if on_host and n not in own:
                    pieces[n] = _on_host(pieces[n])
        if any(isinstance(piece, Placed) for piece in pieces):
            return replace(self, pieces=tuple(pieces))
        return DampedInverse(tuple(pieces))

    def with_pieces(self, pieces: Sequence[Piece]) -> DampedInverse:
        """The same with other pieces of the same units, each in the place of the old one."""
        found = [
            self._place(old.group, new) if isinstance(old, Placed) else new
            for old, new in zip(self.pieces, pieces, strict=True)
        ]
        return replace(self, pieces=tuple(found))

    def mended(self, pieces: Mapping[int, Piece]) -> DampedInverse:
        """The same with other pieces in the place of those that have failed; old ones stay in theirs."""
        return super().mended({n: self._place(self.groups[n], p) for n, p in pieces.items()})

    def check_holders(self, holders: Holders) -> None:
        """Refuse another division of the processes than that which holds it.

        Raises:
            RankError: it is another.
        """
        if holders is not self.holders:
            raise RankError(
                f"The inverse is held in parts by {self.holders.world.size} processes, of which this was "
                f"one; now there are {holders.world.size}, and none of them has all of it. Save the state "
                "before the processes change, and load it into a new optimizer."
            )

    def _place(self, group: int, piece: Piece) -> Piece:
        return place(piece, group, self.holders)


def place(piece: Piece, group: int, holders: Holders) -> Piece:
    """The piece as a process has it that may or may not be of the group that holds it."""
    if isinstance(piece, (Placed, Failed)) or not tensors_in(piece):
        return piece
    return Placed(group, length_of(piece), piece if group == holders.own else None)


def divide(
    inverse: DampedInverse, groups: Sequence[int], holders: Holders, device: torch.device
) -> DividedInverse:
    """A whole inverse without the pieces that this process is not to hold.

    Args:
        inverse: whole.
        groups: that hold the inverse of each unit.
        holders: the groups of processes.
        device: of the tensors.
    """
    pieces: list[Piece] = []
    number = 0
    for piece in inverse.pieces:
        pieces.append(place(piece, groups[number], holders))
        number += length_of(piece)
    return DividedInverse(tuple(pieces), tuple(groups), holders, device)


def _on_host(piece: Piece) -> Piece:
    packed = map_tensors(pack(piece), lambda tensor: tensor.cpu())
    return cast(Piece, Unpacker(torch.device("cpu")).unpack(Storable, packed))


# -------------------------------------------------------------------------------- from process to process


def describe(packed: Any) -> Any:
    """What `pack` made, with what there is to know of it in the place of every tensor."""
    if isinstance(packed, Tensor):
        square = packed.dim() > 1 and packed.shape[-1] == packed.shape[-2]
        symmetric = square and bool((packed == packed.mT).all())
        dtype = str(packed.dtype).removeprefix("torch.")
        return {_TENSOR: list(packed.shape), "dtype": dtype, "symmetric": symmetric}
    if isinstance(packed, dict):
        return {key: describe(item) for key, item in packed.items()}
    return [describe(item) for item in packed] if isinstance(packed, list) else packed


def symmetric_in(described: Any) -> list[bool]:
    """Whether each tensor is symmetric, in their order."""
    if isinstance(described, dict):
        if _TENSOR in described:
            return [described["symmetric"]]
        described = list(described.values())
    if not isinstance(described, list):
        return []
    return [symmetric for item in described for symmetric in symmetric_in(item)]


class Received:
    """Inverses of described kinds and shapes, to be filled in; symmetric matrices travel packed."""

    def __init__(self, described: Sequence[Any], device: torch.device) -> None:
        self._device = device
        unpacker = Unpacker(device)
        packed = [
            self._empty(item) for item in described
        ]  # all at once: tensors go by their identity
        self.pieces = [cast(Piece, unpacker.unpack(Storable, item)) for item in packed]
        pairs = zip(tensors_in(self.pieces), symmetric_in(described), strict=True)
        self.parts = [Part(*pair) for pair in pairs]

    def _empty(self, item: Any) -> Any:
        """What `pack` would make, with zeros in all tensors."""
        if isinstance(item, dict) and _TENSOR in item:
            dtype = getattr(torch, item["dtype"])
            return torch.zeros(item[_TENSOR], dtype=dtype, device=self._device)
        if isinstance(item, dict):
            return {key: self._empty(value) for key, value in item.items()}
        return [self._empty(value) for value in item] if isinstance(item, list) else item
