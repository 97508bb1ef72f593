"""The curvature of one unit: what is estimated of it, and what inverts it.

    taps → moments → operator
    block.average(old, decay).add(taps, …) …  .value() → moments.damped(γ) → .mv(V)

A tap is one use of the unit's matrix V (rows, columns) by some examples: s = V ā at every place, with g the
gradient at s. The gradient of example n is Σ_places g āᵀ. Layouts: ā (examples, places, columns),
g (examples, places, rows). Nothing here knows modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kronfac.errors import StateError
from kronfac.storage import Layout, Storable

if TYPE_CHECKING:
    from kronfac.curvature.damping import Tikhonov


@dataclass(frozen=True)
class Tap:
    """Inputs and output gradients of one use of a unit."""

    inputs: Tensor  # ā (examples, places, columns)
    grads: Tensor  # g (examples, places, rows)
    counts: Tensor | None = None
    """Which places count, (examples, places), bool: padding does not; None for all."""

    def gradients(self) -> Tensor:
        """Σ_places g āᵀ of every example, (examples, rows, columns)."""
        return self.grads.mT @ self.inputs


@dataclass(frozen=True)
class SummedGradient:
    """The gradient of a unit whose uses are not known, summed over the examples."""

    V: Tensor  # (rows, columns)


Taps = Sequence[Tap] | SummedGradient
"""What one pass shows of one unit: its uses, or only their sum."""


@runtime_checkable
class Operator(Protocol):
    """A damped inverse of one unit's curvature: symmetric, positive definite, ready to multiply.

    A frozen dataclass of tensors and numbers that is a `Storable`, so that a stale one can be saved.
    """

    def mv(self, V: Tensor) -> Tensor:
        """The product with V (rows, columns): a new tensor, which the caller may overwrite."""
        ...

    def to_dense(self) -> Tensor:
        """The matrix itself, in the layout of vec(V), which stacks columns."""
        ...


class Moments(Storable, ABC):
    """What is estimated of a unit's curvature: a frozen dataclass of tensors."""

    @abstractmethod
    def damped(self, gamma: float, tikhonov: "Tikhonov") -> Operator:
        """The inverse with damping strength γ [MG15 §6.3].

        Raises:
            NotPositiveDefiniteError, NonFiniteError: there is none.
        """

    @abstractmethod
    def trace(self) -> Tensor:
        """The trace of the curvature, float64."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The matrix itself, in the layout of vec(V), which stacks columns; for tests and pictures."""

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of parameters."""

    def check(self, *units: Layout) -> None:
        """Raise a StateError if they can't be of this unit: of another shape, dtype or size."""
        super().check(*units)
        (unit,) = units
        if self.size != unit.rows * unit.columns:
            raise StateError(
                f"The state's statistics of {unit.name!r} are for {self.size} parameters; there are "
                f"{unit.rows * unit.columns}. Load it into the model that it was saved with."
            )

    def probe(self) -> list[Tensor]:
        """A few scalars that are finite only if the moments are."""
        return [torch.as_tensor(value).sum() for value in _tensors(self)]


def _tensors(moments: Moments) -> list[Tensor]:
    return [getattr(moments, f.name) for f in fields(moments)]  # type: ignore[arg-type]


class Average(Protocol):
    """A moving average that is being made: decay · old + (1 − decay) · (sums over the taps)."""

    def add(self, taps: Taps, first: bool, share: float, weight: float) -> None:
        """Add what one pass shows.

        Args:
            taps: of this unit.
            first: whether the inputs of these taps have not been added yet; several backward passes
                share one forward pass.
            share: of all examples, those in this pass.
            weight: what Σ g gᵀ counts.
        """
        ...

    def value(self) -> Moments:
        """The average with everything that was added."""
        ...


class Block(ABC):
    """How the curvature of a unit is approximated; immutable, holds settings only."""

    moments: ClassVar[type[Moments]]
    """What it estimates."""

    @abstractmethod
    def observe(self, taps: Taps, share: float, weight: float) -> Moments:
        """The moments of one backward pass; those of several passes are added, field by field."""

    def average(self, old: Moments | None, decay: float) -> Average:
        """The moving average that begins with `old`, which is only read."""
        return SimpleAverage(self, old, decay)


M = TypeVar("M", bound=Moments)


class SimpleAverage:
    """decay · old + (1 − decay) Σ observe(taps), for moments that are linear in the data."""

    def __init__(self, block: Block, old: Moments | None, decay: float) -> None:
        self._block, self._old = block, old
        self._decay = 0.0 if old is None else decay
        self._sum: Moments | None = None

    def add(self, taps: Taps, first: bool, share: float, weight: float) -> None:
        """Add what one pass shows."""
        new = self._block.observe(taps, share, weight)
        self._sum = new if self._sum is None else _combine(self._sum, 1.0, new, 1.0)

    def value(self) -> Moments:
        """The average with everything that was added."""
        assert self._sum is not None
        if self._old is None or self._decay == 0:
            return self._sum
        return _combine(self._old, self._decay, self._sum, 1 - self._decay)


def _combine(a: M, x: float, b: M, y: float) -> M:
    """x a + y b, field by field."""
    values: dict[str, Any] = {
        f.name: getattr(a, f.name) * x + getattr(b, f.name) * y
        for f in fields(a)  # type: ignore[arg-type]
    }
    return type(a)(**values)
