"""The processes that train one model together.

All numbers that a decision is taken from are sums over the ranks, in the order of the ranks, so that every
rank takes the same one. They go from rank to rank as messages on the host, each with the name of the phase
that it is of: a rank that fails says so in the place of its next message, and ranks that have come to
different places are told, in place of waiting for each other. Tensors are summed by torch's all_reduce,
which is started right after such a message and waited for where the sums are needed (`reduction.py`).
`docs/notes/messages.md` says which messages a step has, and why.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import IntEnum
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from kronfac.distributed.packing import Packed, Part
from kronfac.distributed.reduction import Reduction, StartedReduction, Tally
from kronfac.errors import RankError

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the message of another one."""
SHORT = 60
"""Numbers that the first messages have; a longer one is sent in two."""
LONG = 1000
"""Numbers up to which all messages are made as long as the longest so far was, so that it fits into one."""
_HEAD = 4
"""Numbers of a message before its own: whether the rank is well, its phase, the length, and how many sums
it has started."""


class Phase(IntEnum):
    """What a message is of, in the order of a step."""

    EVALUATION = 1
    GRADIENT = 2
    COMPARISON = 3
    LOSS = 4
    EXAMPLES = 5
    STATISTICS = 6
    FISHER = 7
    REFRESH = 8
    DIRECTION = 9
    COMMIT = 10
    STATE = 11


class Ranks:
    """One process by itself: nothing has to be told to anybody."""

    rank: int = 0
    size: int = 1

    def gather(self, phase: Phase, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, in the order of the ranks.

        Raises:
            RankError: another rank has failed, is at another place, or does not answer.
        """
        return [list(numbers)]

    def total(self, phase: Phase, numbers: Sequence[float]) -> list[float]:
        """Sums over the ranks of numbers of which every rank has as many."""
        return [math.fsum(column) for column in zip(*self.gather(phase, numbers), strict=True)]

    def prepare(self, flats: Sequence[Tensor]) -> Reduction:
        """A sum of flat tensors over the ranks, in place, to be started right after a message."""
        return Reduction()

    def sum_(
        self, phase: Phase, parts: Sequence[Part], numbers: Sequence[float] = ()
    ) -> list[float]:
        """Sum tensors over the ranks, in place; every rank has the same shapes. Also sums of numbers."""
        return list(numbers)

    def broadcast_(
        self,
        phase: Phase,
        parts: Sequence[Part],
        owner: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take over the tensors of one rank, in place; by the ranks of a group, or by all."""

    def texts(self, phase: Phase, text: str) -> list[str]:
        """The text of every rank, in the order of the ranks."""
        return [text]

    def abandon(self) -> None:
        """Tell the other ranks that this one has failed."""


ALONE = Ranks()


class Processes(Ranks):
    """The ranks of torch's process group."""

    _found: ClassVar[dict[object, "Processes"]] = {}

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._tensors = dist.group.WORLD
        # A group of its own: with a time limit of its own, and on the host whatever the tensors are on.
        self._messages = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._length = SHORT
        """Numbers of a message, the same on all ranks."""
        self.tally = Tally()

    @classmethod
    def current(cls) -> Ranks:
        """The processes of the default group; `ALONE` if there is none, or one process."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return ALONE
        group = dist.group.WORLD
        if group not in cls._found:
            cls._found.clear()  # of groups that have been destroyed
            cls._found[group] = cls()
        return cls._found[group]

    def gather(self, phase: Phase, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of every rank, in the order of the ranks."""
        length = self._length
        head = [0.0, float(phase), float(len(numbers)), float(self.tally.sums)]
        rows = self._exchange(phase, [*head, *numbers[:length]], length)
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            raise RankError(
                f"Rank {_list(failed)} has failed while rank {self.rank} was in the phase "
                f"{phase.name}: no rank takes this step. Its own error says why."
            )
        if len({(row[1], row[3]) for row in rows}) > 1:
            places = ", ".join(
                f"rank {r}: {Phase(int(row[1])).name} after {int(row[3])} sums"
                for r, row in enumerate(rows)
            )
            raise RankError(
                "The ranks have come to different places, because they do not do the same: "
                f"{places}. Call step() and state_dict() equally often on all ranks, with equal settings."
            )
        most = max(int(row[2]) for row in rows)
        if most > length:
            rest = self._exchange(phase, [0.0] * _HEAD + list(numbers[length:]), most - length)
            rows = [row + more[_HEAD:] for row, more in zip(rows, rest, strict=True)]
            # All ranks know this, so that also one that fails sends as many.
            self._length = max(length, min(most, LONG))
        return [row[_HEAD : _HEAD + int(row[2])] for row in rows]

    def _exchange(self, phase: Phase, message: Sequence[float], length: int) -> list[list[float]]:
        own = torch.zeros(_HEAD + length, dtype=torch.float64)
        own[: len(message)] = torch.tensor(message, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.size)]
        began = time.perf_counter()
        with self._answered():
            dist.all_gather(found, own, group=self._messages)
        self._count(phase, began)
        return [row.tolist() for row in found]

    def _count(self, phase: Phase, began: float) -> None:
        self.tally.messages[phase.name] += 1
        self.tally.talked += time.perf_counter() - began

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Errors of torch's, in which a rank that has ended shows, as a RankError."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"Rank {self.rank} got no answer from another rank in time (messages: {TIMEOUT}), or that "
                "has ended: no step is taken. Start all ranks again from the last checkpoint."
            ) from error

    def prepare(self, flats: Sequence[Tensor]) -> Reduction:
        """A sum of flat tensors over the ranks, in place, to be started right after a message."""
        return StartedReduction(flats, self._tensors, self.tally, self._answered)

    def sum_(
        self, phase: Phase, parts: Sequence[Part], numbers: Sequence[float] = ()
    ) -> list[float]:
        """Sum tensors over the ranks, in place, each kind of them in one all_reduce; and numbers."""
        packed = Packed(parts)
        reduction = self.prepare(packed.flats)
        totals = self.total(phase, numbers)
        reduction.start()
        reduction.wait()
        packed.unpack()
        return totals

    def broadcast_(
        self,
        phase: Phase,
        parts: Sequence[Part],
        owner: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Take over the tensors of one rank, in place; by the ranks of a group, or by all."""
        packed = Packed(parts)
        for flat in packed.flats:
            with self._answered():
                dist.broadcast(flat, owner, group=self._tensors if group is None else group)
            self.tally.broadcasts += 1
            self.tally.bytes += flat.numel() * flat.element_size()
        if self.rank != owner:
            packed.unpack()

    def texts(self, phase: Phase, text: str) -> list[str]:
        """The text of every rank, in the order of the ranks."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [int(row[0]) for row in self.gather(phase, [float(len(own))])]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in range(self.size)]
        began = time.perf_counter()
        with self._answered():
            dist.all_gather(found, padded, group=self._messages)
        self._count(phase, began)
        pairs = zip(found, lengths, strict=True)
        return [bytes(row[:length].tolist()).decode() for row, length in pairs]

    def abandon(self) -> None:
        """Say in the place of the next message that this rank has failed."""
        with suppress(RankError):  # the others have ended
            self._exchange(Phase.STATE, [1.0], self._length)


def _list(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def on_device(number: float, like: Tensor) -> Tensor:
    """A float64 number where a tensor is."""
    return torch.tensor(number, dtype=torch.float64, device=like.device)
