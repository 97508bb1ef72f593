"""Sums over the ranks that travel while a rank computes something else.

Three steps: its memory is there, it is started, it has arrived. It is started right after a message that
showed all ranks well, and all memory is there before that message: so nothing can fail in between, and a
sum that one rank has started all ranks have. What a rank that fails later has started goes on by itself,
and nobody has to wait for it.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import Tensor


@dataclass
class Tally:
    """What a rank has sent, and how long it took."""

    messages: Counter[str] = field(default_factory=Counter)
    """Messages on the host, by their phase; a long one counts as two."""
    sums: int = 0
    """All_reduces of tensors."""
    broadcasts: int = 0
    bytes: int = 0
    """Those of the tensors that were summed or broadcast."""
    talked: float = 0.0
    """Seconds in messages, the wait for other ranks included."""
    waited: float = 0.0
    """Seconds in which the rank did nothing but wait for sums."""

    def started(self, flat: Tensor, work: dist.Work) -> None:
        """Count a sum that was started."""
        self.sums += 1
        self.bytes += flat.numel() * flat.element_size()


class Reduction:
    """A sum over ranks; in one process there is nothing to do."""

    def start(self, factor: float = 1.0) -> None:
        """Send this rank's tensors, times a factor."""

    def wait(self) -> None:
        """Return when the sums have arrived."""


class StartedReduction(Reduction):
    """The sums of flat tensors over a process group, in their own memory."""

    def __init__(
        self,
        flats: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        tally: Tally,
        answered: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._flats, self._group = flats, group
        self._tally, self._answered = tally, answered
        self._works: list[dist.Work] = []

    def start(self, factor: float = 1.0) -> None:
        """Send this rank's tensors, times a factor."""
        for flat in self._flats:
            flat.mul_(factor)
            with self._answered():
                work = dist.all_reduce(flat, group=self._group, async_op=True)
            assert work is not None
            self._works.append(work)
            self._tally.started(flat, work)

    def wait(self) -> None:
        """Return when the sums have arrived."""
        works, self._works = self._works, []
        began = time.perf_counter()
        for work in works:
            with self._answered():
                work.wait()
        self._tally.waited += time.perf_counter() - began
