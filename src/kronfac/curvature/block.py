"""The curvature of one unit: its statistics and its damped inverse.

    taps → moments → operator
    block.average(old, decay).add(taps, …) …  .value() → moments.damped(γ) → .mv(V)

Taps are the inputs and gradients of a unit in one backward pass, see `taps.py`. Nothing here knows modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kronfac.curvature.taps import Taps
from kronfac.errors import StateError
from kronfac.storage import Layout, Storable

if TYPE_CHECKING:
    from kronfac.curvature.tikhonov import Tikhonov

Part = tuple[Tensor, bool]
"""A sum over examples, and whether it is a symmetric matrix, of which one half is enough."""


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


@dataclass(frozen=True)
class InverseCost:
    """Memory and computation of the damped inverse of a unit's curvature."""

    numbers: int
    """Numbers that it holds."""
    inversion: float
    """Multiplications that make it."""
    product: float
    """Multiplications of a product with V."""

    def __add__(self, other: "InverseCost") -> "InverseCost":
        return InverseCost(
            self.numbers + other.numbers,
            self.inversion + other.inversion,
            self.product + other.product,
        )


def eigh_cost(n: int) -> float:
    """Multiplications of an eigendecomposition, about six times those of the inverse."""
    return 3.0 * n**3


class Moments(Storable, ABC):
    """The statistics of a unit's curvature: a frozen dataclass of tensors."""

    symmetric: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that are symmetric matrices (…, n, n), or diagonals (n,) in their place."""

    @abstractmethod
    def damped(self, gamma: float, tikhonov: "Tikhonov") -> Operator:
        """The inverse with damping strength γ [MG15 §6.3].

        Raises:
            NotPositiveDefiniteError, NonFiniteError: there is none.
        """

    @abstractmethod
    def trace(self) -> Tensor:
        """The trace of the curvature, float64."""

    def factor_traces(self) -> Tensor | None:
        """tr(A) tr(G) of a Kronecker product A ⊗ G, float64; None for other blocks.

        `Curvature.sampling_error` is computed from it. Several products over the same parameters give their
        sum, products over parts of them their mean.
        """
        return None

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

    def inverse_cost(self) -> InverseCost:
        """Cost of `damped` in its factored form: matrices are inverted by Cholesky, in n³/6 + n³/3."""
        cost = InverseCost(0, 0.0, 0.0)
        for M, symmetric in parts_of(self):
            n = M.shape[-1] if symmetric and M.dim() > 1 else 0
            cost += InverseCost(M.numel(), M.numel() * n / 2, float(self.size * max(n, 1)))
        return cost

    def probe(self) -> list[Tensor]:
        """A few scalars that are finite only if the moments are.

        Of a positive semi-definite matrix the trace: if it is finite, so is the diagonal, which bounds the
        rest.
        """
        return [
            (M.diagonal(dim1=-2, dim2=-1) if symmetric and M.dim() > 1 else M).sum()
            for M, symmetric in parts_of(self)
        ]


def parts_of(moments: Moments) -> list[Part]:
    """The tensors of moments, and whether they are symmetric."""
    found: list[Part] = []
    for f in fields(moments):  # type: ignore[arg-type]
        value = getattr(moments, f.name)
        if isinstance(value, Moments):
            found += parts_of(value)
        elif isinstance(value, Tensor):
            found.append((value, f.name in moments.symmetric))
    return found


def traces(M: Tensor) -> Tensor:
    """The traces of matrices (…, n, n), or of one that is given by its diagonal (n,), float64."""
    return (M if M.dim() == 1 else M.diagonal(dim1=-2, dim2=-1)).sum(dim=-1, dtype=torch.float64)


class Summand(Protocol):
    """Statistics that are summed over the ranks."""

    def counts(self) -> list[float]:
        """The number of vectors in each part, for parts that are means; 0 for sums."""
        ...

    def weigh(self, totals: Sequence[float]) -> None:
        """Multiply means by their share of all ranks' vectors, so that sums over the ranks are means."""
        ...

    def parts(self) -> list[Part]:
        """The sums and means so far, of an average without an old value.

        After something was added: all ranks have the same shapes.
        """
        ...


class Average(Summand, Protocol):
    """A moving average in the making: decay · old + (1 − decay) · (sums and means over the taps)."""

    def add(self, taps: Taps, each: float, weight: float) -> None:
        """Add the statistics of one pass.

        Args:
            taps: of this unit.
            each: the weight of every vector ā in means; 0 if it has been counted, because several backward
                passes share one forward pass.
            weight: the factor of Σ g gᵀ.
        """
        ...

    def value(self) -> Moments:
        """The average with everything that was added."""
        ...


class Block(ABC):
    """How the curvature of a unit is approximated; immutable, holds settings only."""

    moments: ClassVar[type[Moments]]
    """The class of its statistics."""

    @abstractmethod
    def observe(self, taps: Taps, weight: float) -> Moments:
        """The moments of one backward pass; moments of several passes are added, field by field."""

    def describe(self, rows: int, columns: int) -> str:
        """A word or two for `kronfac.plan`."""
        return f"{type(self).__name__.removesuffix('Block')} ({rows}, {columns})"

    def average(self, old: Moments | None, decay: float) -> Average:
        """The moving average that begins with `old`, which is only read."""
        return SumAverage(self, old, decay)


S = TypeVar("S", bound=Storable)


class SumAverage:
    """decay · old + (1 − decay) Σ observe(taps), for moments that are linear in the data."""

    def __init__(self, block: Block, old: Moments | None, decay: float) -> None:
        self._block, self._old, self._decay = block, old, decay
        self._sum: Moments | None = None

    def add(self, taps: Taps, each: float, weight: float) -> None:
        """Add the statistics of one pass."""
        new = self._block.observe(taps, weight)
        self._sum = new if self._sum is None else _combine(self._sum, 1.0, new, 1.0)

    def value(self) -> Moments:
        """The average with everything that was added."""
        if self._sum is None:
            assert self._old is not None
            return self._old
        return blend(self._old, self._sum, self._decay)

    def counts(self) -> list[float]:
        """None: there are no means."""
        return []

    def weigh(self, totals: Sequence[float]) -> None:
        """Nothing: there are no means."""

    def parts(self) -> list[Part]:
        """The fields of the sum."""
        assert self._sum is not None
        return parts_of(self._sum)


def blend(old: Storable | None, new: S, decay: float) -> S:
    """decay · old + (1 − decay) · new; the new one if there is no old one of its kind."""
    if decay == 0 or not isinstance(old, type(new)):
        return new
    return _combine(old, decay, new, 1 - decay)


def _combine(a: S, x: float, b: S, y: float) -> S:
    """x a + y b, tensor by tensor; anything else, such as sizes and absent tensors, is taken from b."""
    values: dict[str, Any] = {}
    for f in fields(b):  # type: ignore[arg-type]
        left, right = getattr(a, f.name), getattr(b, f.name)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            values[f.name] = left * x + right * y
        else:
            values[f.name] = _combine(left, x, right, y) if isinstance(left, Storable) else right
    return type(b)(**values)
