"""From statistics to something that multiplies a vector: strategy → prepared → damped.

    strategy.prepare(factors).damped(gamma).mv(gradients)

`prepare` does what every candidate γ shares, `damped` the rest. A vector in parameter space is a
tuple with one matrix V (out, in+1) for each layer.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, Protocol

from torch import Tensor

from kronfac.factors import KroneckerFactors

Matrices = tuple[Tensor, ...]


class DampedInverse(ABC):
    """An approximate Fisher inverse, damped: symmetric, positive definite and ready to multiply.

    Subclasses are dataclasses of tensors, tuples and further such dataclasses, so that a stale one
    can be saved and continued from bit for bit.
    """

    @abstractmethod
    def mv(self, vectors: Sequence[Tensor]) -> Matrices:
        """The product with a vector in parameter space.

        New tensors, which the caller may overwrite, or `vectors` themselves.
        """


class PreparedInverse(Protocol):
    """What is shared by all γ at one refresh."""

    def damped(self, gamma: float) -> DampedInverse:
        """The inverse with damping strength γ [MG15 §6.6]."""
        ...


class ApproximateInverse(ABC):
    """How the Fisher is approximated and inverted; immutable, holds settings only."""

    needs_neighbours: ClassVar[bool] = False
    """Whether `A_next` and `G_next` are needed, which takes a chain of layers."""
    low_rank: bool | None = False
    """Whether gradients are multiplied in factored form where that is cheaper [MG15 §8]; None if that is
    left to `wants_rows`."""

    def wants_rows(
        self, shapes: Sequence[tuple[int, int]], cases: int, weight_decay: float
    ) -> bool:
        """Whether it has a use for the gradient in factors, with such layers and so many cases."""
        return bool(self.low_rank)

    @property
    def for_trials(self) -> "ApproximateInverse":
        """An inverse much like this one, for trial steps, where this one is expensive."""
        return self

    @abstractmethod
    def prepare(self, factors: KroneckerFactors) -> PreparedInverse:
        """What every γ shares."""

    @abstractmethod
    def load(self, packed: dict[str, Any]) -> DampedInverse:
        """The damped inverse that `pack` made plain."""


def pack(value: Any) -> Any:
    """Plain dicts, lists, tensors and numbers from a dataclass of such things, for saving."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: pack(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple)):
        return [pack(item) for item in value]
    return value
