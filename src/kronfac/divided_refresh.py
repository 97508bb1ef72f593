"""A refresh of the inverse in which every rank inverts some of the blocks, and gets others.

Units are given to ranks by what their inverse costs, the dearest first, each to the rank that has least to
do so far; a chain goes to one rank as a whole. It is sent to the ranks that are to hold it: all of them, or
those of a group (`divided_inverse.py`). So the inverse is the same on all of these to the last bit, which
one that every rank had computed for itself would not be.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kronfac.assignment import assign
from kronfac.curvature import ApproximateInverse, Curvature, DampedInverse
from kronfac.curvature.inverse import (
    Piece,
    Placed,
    PreparedInverse,
    failed,
    length_of,
    without_unusable,
)
from kronfac.distributed import Holders, Phase
from kronfac.divided_inverse import DividedInverse, Received, describe, divide, place, symmetric_in
from kronfac.errors import RankError
from kronfac.linalg import Failure
from kronfac.refresh import Computed, Outcome
from kronfac.storage import pack, tensors_in


def prepare_over_ranks(
    inverse: ApproximateInverse, curvature: Curvature, holders: Holders
) -> PreparedInverse:
    """What every γ shares, with the work divided if there are several ranks."""
    if holders.world.size == 1:
        return inverse.prepare(curvature)
    return _Prepared(inverse, curvature, holders)


def hold(inverse: DampedInverse, curvature: Curvature, holders: Holders) -> DampedInverse:
    """A whole inverse, such as a loaded one, without the pieces that this rank is not to hold.

    Raises:
        RankError: it is divided already, among other ranks.
    """
    if isinstance(inverse, DividedInverse):
        inverse.check_holders(holders)
    elif holders.divided:
        device = tensors_in(curvature)[0].device
        return divide(inverse, _groups(curvature, holders), holders, device)
    return inverse


def _groups(curvature: Curvature, holders: Holders) -> tuple[int, ...]:
    """The group of ranks that holds the inverse of each unit: that of the rank which computes it."""
    return tuple(map(holders.group_of, owners_of(curvature, holders.world.size)))


@dataclass(frozen=True)
class _Prepared:
    inverse: ApproximateInverse
    curvature: Curvature
    holders: Holders

    def damped(self, gamma: float) -> DampedInverse:
        (outcome,) = Divided(self.inverse, self.curvature, (gamma,), self.holders)
        assert isinstance(outcome, DampedInverse)
        return outcome


class Divided:
    """Outcomes of which every rank computes its part, and which are put together when asked for.

    Args:
        inverse: how the curvature is inverted.
        curvature: the same on all ranks.
        candidates: the γ's.
        holders: who is to hold which part.
    """

    def __init__(
        self,
        inverse: ApproximateInverse,
        curvature: Curvature,
        candidates: tuple[float, ...],
        holders: Holders,
    ) -> None:
        world = holders.world
        self._world, self._holders, self._curvature = world, holders, curvature
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
        world, holders = self._world, self._holders
        device = tensors_in(self._curvature)[0].device
        if holders.divided:  # here, because ranks that do not hold a piece can't tell
            own = without_unusable(own)
        said = [(length_of(piece), describe(pack(piece))) for piece in own]
        texts = world.texts(Phase.REFRESH, json.dumps([len(holders.groups), said]))
        told = [json.loads(text) for text in texts]
        _check_groups([groups for groups, _ in told])
        found = [
            Received(
                [piece for _, piece in pieces if holders.holds(r) or not symmetric_in(piece)],
                device,
            )
            for r, (_, pieces) in enumerate(told)
        ]
        # As the others get it: the layout of its memory decides how a product is rounded.
        for to, made in zip(found[world.rank].parts, tensors_in(list(own)), strict=True):
            to.tensor.copy_(made)
        world.gather(Phase.REFRESH, [])  # all ranks have the memory for it
        pieces: dict[int, Piece] = {}
        for rank, (received, (_, theirs)) in enumerate(zip(found, told, strict=True)):
            holders.send_(Phase.REFRESH, received.parts, rank)
            group, arrived, start = holders.group_of(rank), iter(received.pieces), 0
            for length, described in theirs:
                here = holders.holds(rank) or not symmetric_in(described)
                piece: Piece = next(arrived) if here else Placed(group, length, None)
                number = self._owned[rank][start]
                pieces[number] = place(piece, group, holders) if holders.divided else piece
                start += length
        ordered = tuple(pieces[n] for n in sorted(pieces))
        if not holders.divided:
            return DampedInverse(ordered)
        return DividedInverse(ordered, _groups(self._curvature, holders), holders, device)


def _check_groups(found: Sequence[int]) -> None:
    if len(set(found)) > 1:
        raise RankError(
            "The ranks have different settings of inverse_share, by which these numbers of groups hold "
            f"an inverse, rank by rank: {list(found)}. Give all ranks the same one."
        )


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
