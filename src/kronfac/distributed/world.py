"""The processes that train together, and how they gather numbers and sum tensors.

Numbers that a decision depends on are gathered on the host and added in the order of the ranks. So all
ranks get the same sums, to the last bit, and decide alike. Every message carries the phase of the step.
A rank that fails sends a notice in place of its next message, and ranks that are in different phases raise
an error instead of waiting for each other. Torch's all_reduce sums tensors, right after such a message.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from heapq import heapreplace
from typing import Any, ClassVar, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from kronfac.distributed.packing import Packed
from kronfac.errors import RankError

Phase = Literal[
    "evaluation",
    "gradient",
    "comparison",
    "loss",
    "examples",
    "statistics",
    "fisher",
    "refresh",
    "commit",
    "state",
]
"""The part of a step that a sum or a message belongs to."""
TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another rank's message."""
SHORT = 60
"""Numbers in a message at first; a longer one is sent in two parts."""
LONG = 1000
"""The longest that messages grow to, so that the longest one so far fits into one part."""
_HEAD = 3
"""Numbers of a message before its own: whether the rank has failed, the phase, and the length."""
_TENSOR = "tensor"
"""The entry that stands for a tensor in a tree that is sent as text."""
_PHASES: tuple[Phase, ...] = get_args(Phase)


class World:
    """One process by itself: sums and gathered numbers are its own."""

    rank: int = 0
    size: int = 1

    def __init__(self) -> None:
        self.messages: Counter[str] = Counter()
        """Messages on the host so far, by their phase; one in two parts counts twice."""
        self.sums = 0
        """All_reduces of tensors so far."""

    @staticmethod
    def current() -> "World":
        """The processes of torch's default group; `ALONE` if there is no group, or one process."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return ALONE
        return Processes.of_default_group()

    def gather(self, numbers: Sequence[float], phase: Phase) -> list[list[float]]:
        """Return the numbers of every rank, in the order of the ranks.

        Raises:
            RankError: another rank has failed, is in another phase, or does not answer.
        """
        return [list(numbers)]

    def total(self, numbers: Sequence[float], phase: Phase) -> list[float]:
        """Add numbers over the ranks; every rank has equally many."""
        return [math.fsum(column) for column in zip(*self.gather(numbers, phase), strict=True)]

    def agree(self, numbers: Sequence[float], phase: Phase, what: str) -> None:
        """Make sure that all ranks have the same numbers.

        Raises:
            RankError: they have not; `what` names the numbers.
        """
        rows = self.gather(numbers, phase)
        if any(row != rows[0] for row in rows):
            raise RankError(
                f"The ranks have computed different {what}: {rows}. No rank takes the step. They have to "
                "have the same model, settings, torch and kind of processor."
            )

    def sum(
        self,
        tensors: Sequence[Tensor],
        phase: Phase,
        *,
        symmetric: Sequence[bool] = (),
        numbers: Sequence[float] = (),
    ) -> list[float]:
        """Sum tensors over the ranks, in place, and numbers.

        Args:
            tensors: of the same shapes on all ranks.
            phase: see `Phase`.
            symmetric: whether each of them is a symmetric matrix, of which one half is sent.
            numbers: to be summed too; their sums are returned.
        """
        return list(numbers)

    def exchange(self, tree: Any, device: torch.device, phase: Phase) -> list[Any]:
        """Broadcast dicts, lists, tensors and plain values from every rank to all others.

        Returns:
            The tree of every rank, in the order of the ranks. Tensors are on this device, with the same
            layout in memory on all ranks: products of tensors with different layouts differ by rounding.
        """
        return [tree]

    def assign(self, costs: Sequence[float]) -> list[int]:
        """The rank for each piece of work, the same on all ranks without a message."""
        return assign(costs, self.size)

    def abandon(self) -> None:
        """Tell the other ranks that this one has failed."""


ALONE = World()


class Processes(World):
    """The ranks of torch's default process group."""

    _found: ClassVar[dict[object, "Processes"]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._tensors = dist.group.WORLD
        # A group of its own: with a time limit of its own, and on the host wherever the tensors are.
        self._host = dist.new_group(backend="gloo", timeout=TIMEOUT)
        self._length = SHORT
        """Numbers of a message, the same on all ranks."""

    @classmethod
    def of_default_group(cls) -> "Processes":
        """One object for as long as the group exists."""
        group = dist.group.WORLD
        if group not in cls._found:
            cls._found.clear()  # of groups that have been destroyed
            cls._found[group] = cls()
        return cls._found[group]

    def gather(self, numbers: Sequence[float], phase: Phase) -> list[list[float]]:
        """Return the numbers of every rank, in the order of the ranks."""
        length = self._length
        head = [0.0, float(_PHASES.index(phase)), float(len(numbers))]
        rows = self._send([*head, *numbers[:length]], length, phase)
        failed = [rank for rank, row in enumerate(rows) if row[0]]
        if failed:
            raise RankError(
                f"Rank {', '.join(map(str, failed))} has failed while rank {self.rank} was in the phase "
                f"{phase!r}: no rank takes this step. Its own error has the reason."
            )
        if len({row[1] for row in rows}) > 1:
            phases = ", ".join(f"rank {r}: {_PHASES[int(row[1])]!r}" for r, row in enumerate(rows))
            raise RankError(
                "The ranks have come to different places, because they do not do the same: "
                f"{phases}. Call step() equally often on all ranks, with equal settings."
            )
        most = max(int(row[2]) for row in rows)
        if most > length:
            rest = self._send([0.0] * _HEAD + list(numbers[length:]), most - length, phase)
            rows = [row + more[_HEAD:] for row, more in zip(rows, rest, strict=True)]
            # All ranks know the new length, so that a rank that fails sends as many.
            self._length = max(length, min(most, LONG))
        return [row[_HEAD : _HEAD + int(row[2])] for row in rows]

    def sum(
        self,
        tensors: Sequence[Tensor],
        phase: Phase,
        *,
        symmetric: Sequence[bool] = (),
        numbers: Sequence[float] = (),
    ) -> list[float]:
        """Sum tensors over the ranks, in place, with one all_reduce per dtype and device; and numbers."""
        # Before the message: after it, nothing can fail on one rank alone.
        packed = Packed(tensors, symmetric or [False] * len(tensors))
        totals = self.total(numbers, phase)
        for flat in packed.flats:
            with self._answered():
                dist.all_reduce(flat, group=self._tensors)
            self.sums += 1
        packed.unpack()
        return totals

    def exchange(self, tree: Any, device: torch.device, phase: Phase) -> list[Any]:
        """Broadcast dicts, lists, tensors and plain values from every rank to all others."""
        own: dict[int, Tensor] = {}

        def number(tensor: Tensor) -> dict[str, int]:
            own.setdefault(id(tensor), tensor)
            return {_TENSOR: list(own).index(id(tensor))}

        text = json.dumps(tree, default=number)
        kinds = [_describe(tensor) for tensor in own.values()]
        described = [json.loads(text) for text in self._texts(json.dumps([text, kinds]), phase)]
        found = [
            [
                torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
                for shape, dtype, _ in kinds
            ]
            for _, kinds in described
        ]
        for received, tensor in zip(found[self.rank], own.values(), strict=True):
            received.copy_(tensor)
        self.gather([], phase)  # all ranks have the memory for it
        for owner, (tensors, (_, kinds)) in enumerate(zip(found, described, strict=True)):
            self._broadcast(tensors, [symmetric for *_, symmetric in kinds], owner)

        def restored(text: str, tensors: Sequence[Tensor]) -> Any:
            def restore(item: dict[str, Any]) -> Any:
                return tensors[item[_TENSOR]] if item.keys() == {_TENSOR} else item

            return json.loads(text, object_hook=restore)

        return [
            restored(text, tensors) for (text, _), tensors in zip(described, found, strict=True)
        ]

    def abandon(self) -> None:
        """Tell the other ranks, in place of the next message, that this one has failed."""
        with suppress(RankError):  # the others have ended
            self._send([1.0], self._length, "state")

    def _broadcast(self, tensors: Sequence[Tensor], symmetric: Sequence[bool], owner: int) -> None:
        packed = Packed(tensors, symmetric)
        for flat in packed.flats:
            with self._answered():
                dist.broadcast(flat, owner, group=self._tensors)
        if self.rank != owner:
            packed.unpack()

    def _texts(self, text: str, phase: Phase) -> list[str]:
        """The text of every rank, in the order of the ranks."""
        own = torch.tensor(list(text.encode()), dtype=torch.uint8)
        lengths = [int(row[0]) for row in self.gather([float(len(own))], phase)]
        padded = torch.zeros(max(lengths), dtype=torch.uint8)
        padded[: len(own)] = own
        pairs = zip(self._all_gather(padded, phase), lengths, strict=True)
        return [bytes(row[:length].tolist()).decode() for row, length in pairs]

    def _send(self, message: Sequence[float], length: int, phase: Phase) -> list[list[float]]:
        own = torch.zeros(_HEAD + length, dtype=torch.float64)
        own[: len(message)] = torch.tensor(message, dtype=torch.float64)
        return [row.tolist() for row in self._all_gather(own, phase)]

    def _all_gather(self, own: Tensor, phase: Phase) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.size)]
        with self._answered():
            dist.all_gather(found, own, group=self._host)
        self.messages[phase] += 1
        return found

    @contextmanager
    def _answered(self) -> Iterator[None]:
        """Raise torch's errors, which mean that another rank has ended, as a RankError."""
        try:
            yield
        except RuntimeError as error:
            raise RankError(
                f"Rank {self.rank} got no answer from another rank, which has ended or took longer than "
                f"{TIMEOUT}: no step is taken. Start all ranks again from the last checkpoint."
            ) from error


def _describe(tensor: Tensor) -> tuple[list[int], str, bool]:
    """Shape, dtype, and whether it is a symmetric matrix."""
    square = tensor.dim() > 1 and tensor.shape[-1] == tensor.shape[-2]
    symmetric = square and bool((tensor == tensor.mT).all())
    return list(tensor.shape), str(tensor.dtype).removeprefix("torch."), symmetric


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign pieces of work greedily: the most expensive first, each to the least-loaded rank.

    The largest load is at most (4/3 − 1/(3 ranks)) times that of the best assignment (Graham 1969, LPT).
    Of equal costs the earlier piece goes first, of equal loads the lower rank.
    """
    found = [0] * len(costs)
    loads = [(0.0, rank) for rank in range(ranks)]
    for piece in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        load, rank = loads[0]
        found[piece] = rank
        heapreplace(loads, (load + costs[piece], rank))
    return found
