"""Bytes that a computation holds, counted tensor by tensor on any device, and for more examples.

Every storage that an operation returns counts until it is freed. What an operation takes for itself while
it runs, such as the working memory of a convolution, is not seen.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that are made while it is entered, each from its making to its end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held = 0
        """Bytes that live now."""
        self.course: list[int] = []
        """Bytes that lived after each operation."""
        self._alive: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _key(tensor) not in given | self._alive:
                self._add(tensor)
        self.course.append(self.held)
        return result

    def _add(self, tensor: Tensor) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        self._alive.add(key)
        self.held += storage.nbytes()
        weakref.finalize(storage, self._free, key, storage.nbytes())

    def _free(self, key: int, count: int) -> None:
        self._alive.discard(key)
        self.held -= count


def _key(tensor: Tensor) -> int:
    """What tells a storage from all others that live."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(frozen=True)
class Peak:
    """The peak of a pass by its number of examples, from its courses on two numbers of them.

    Every point of a course is a number that is fixed and one that grows with the examples; which point is
    the highest depends on how many there are. So each is extrapolated by itself.
    """

    few: int
    more: int
    points: tuple[tuple[int, int], ...]
    """Bytes on `few` and on `more` examples, of the points that may be the highest."""

    @classmethod
    def of(cls, courses: Sequence[tuple[int, Sequence[int]]]) -> "Peak":
        """The peak from numbers of examples, each with `LiveBytes.course` on them."""
        (few, small), (more, large) = courses
        if len(small) != len(large):  # not the same points
            small, large = [max(small, default=0)], [max(large, default=0)]
        # On no number of examples a point is the highest that another is above in start and in growth.
        highest: list[tuple[int, int]] = []
        for growth, b in sorted({(b - a, b) for a, b in zip(small, large, strict=True)}):
            start = b * (more - few) - more * growth
            while highest and _start(few, more, highest[-1]) <= start:
                highest.pop()
            highest.append((b - growth, b))
        return cls(few, more, tuple(highest))

    def at(self, examples: int) -> int:
        """The peak on so many examples."""
        if self.few == self.more:
            return max((b for _, b in self.points), default=0)
        factor = (examples - self.more) / (self.more - self.few)
        return max(0, *(round(b + factor * (b - a)) for a, b in self.points), 0)


def _start(few: int, more: int, point: tuple[int, int]) -> int:
    """Bytes of a point on no examples, times `more` − `few`."""
    a, b = point
    return b * (more - few) - more * (b - a)


def peak_for(examples: int, courses: Sequence[tuple[int, Sequence[int]]]) -> int:
    """The peak on so many examples, from the courses on two smaller numbers of them."""
    return Peak.of(courses).at(examples)
