"""Which ranks hold which inverses [Pauloski et al. 2021, KAISA].

Ranks are in groups, all ranks of a group hold the same inverses, and what one group alone can compute is
sent to the others. The j-th ranks of all groups form a column, within which it is sent: with n groups a
rank sends (n − 1)/n of a vector, however many ranks there are. In a group with fewer ranks than another,
some stand in two columns.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch.distributed as dist

from kronfac.assignment import groups_of_ranks
from kronfac.distributed.packing import Part
from kronfac.distributed.world import Phase, Ranks


class Holders:
    """The groups of ranks, and how tensors go within and between them."""

    _found: ClassVar[dict[tuple[Ranks, int], "Holders"]] = {}

    def __init__(self, world: Ranks, groups: Sequence[Sequence[int]]) -> None:
        self.world, self.groups = world, groups
        self._group_of = {rank: n for n, ranks in enumerate(groups) for rank in ranks}
        self.own = self._group_of[world.rank]
        """The group of this rank."""
        self._within: dist.ProcessGroup | None = None
        self._columns: list[tuple[list[int], dist.ProcessGroup | None]] | None = None

    @classmethod
    def of(cls, world: Ranks, share: float) -> "Holders":
        """The groups of which each has this share of the ranks."""
        groups = groups_of_ranks(world.size, share)
        if world.size == 1:
            return cls(world, groups)
        key = world, len(groups)
        if key not in cls._found:
            for other in [kept for kept in cls._found if kept[0] is not world]:
                del cls._found[other]  # of processes that have ended
            cls._found[key] = cls(world, groups)
        return cls._found[key]

    @property
    def divided(self) -> bool:
        """Whether no rank holds everything."""
        return len(self.groups) > 1

    def group_of(self, rank: int) -> int:
        """The group of a rank."""
        return self._group_of[rank]

    def holds(self, rank: int) -> bool:
        """Whether this rank holds what another one has computed."""
        return self.group_of(rank) == self.own

    def first_of(self, group: int) -> int:
        """The rank that speaks for a group."""
        return self.groups[group][0]

    def send_(self, phase: Phase, parts: Sequence[Part], owner: int) -> None:
        """Take over the tensors of one rank, in place, by all of its group; others do nothing.

        All ranks call it, right after a message.
        """
        if not self.divided:
            self.world.broadcast_(phase, parts, owner)
            return
        self._connect()
        if self.holds(owner) and len(self.groups[self.own]) > 1:
            self.world.broadcast_(phase, parts, owner, self._within)

    def exchange_(self, phase: Phase, parts: Sequence[Sequence[Part]]) -> None:
        """Take over, from every group, the tensors that it has for all ranks, in place.

        All ranks call it, right after a message.

        Args:
            phase: what it is of.
            parts: of every group; all ranks have the same shapes.
        """
        if not self.divided:
            return
        self._connect()
        assert self._columns is not None
        for ranks, connection in self._columns:
            for source, some in zip(ranks, parts, strict=True):
                if some:
                    self.world.broadcast_(phase, some, source, connection)

    def _connect(self) -> None:
        """Make torch's groups: all of them on all ranks, in one order, as torch wants it."""
        if self._columns is not None:
            return
        for ranks in self.groups:
            if len(ranks) > 1:
                made = dist.new_group(list(ranks))
                self._within = made if self.world.rank in ranks else self._within
        self._columns = []
        for number in range(max(map(len, self.groups))):
            # The rank of each group in this column; of a smaller group one that is in another one, too.
            column = [ranks[number % len(ranks)] for ranks in self.groups]
            made = None if len(column) == self.world.size else dist.new_group(column)
            if self.world.rank in column:
                self._columns.append((column, made))
