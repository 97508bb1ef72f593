"""A value that is computed, or waited for, when it is first needed."""

from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

T = TypeVar("T")


class Later(Generic[T]):
    """What a function gives, which is called once, when the value is asked for."""

    def __init__(self, find: Callable[[], T]) -> None:
        self._find: Callable[[], T] | None = find

    @cached_property
    def value(self) -> T:
        """The value."""
        assert self._find is not None
        found, self._find = self._find(), None  # which holds on to what it is made from
        return found
