"""The curvature of one unit: what is estimated of it, and what inverts it.

    taps → moments → operator
    block.average(old, decay).add(taps, …) …  .value() → moments.damped(γ) → .mv(V)

`taps.py` has what a backward pass shows of a unit. Nothing here knows modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from kronfac.curvature.taps import Taps
from kronfac.errors import StateError
from kronfac.storage import Layout, Storable, tensors_in

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
    """What the damped inverse of a unit's curvature takes."""

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


def cholesky_inverse_cost(n: int) -> float:
    """Multiplications of the inverse of an (n, n) matrix by Cholesky: n³/6 + n³/3."""
    return n**3 / 2


def eigh_cost(n: int) -> float:
    """Multiplications of an eigendecomposition, about six times those of the inverse."""
    return 3.0 * n**3


class Moments(Storable, ABC):
    """What is estimated of a unit's curvature: a frozen dataclass of tensors."""

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
        """tr(A) tr(G) of a Kronecker product A ⊗ G, float64; None for blocks that are none.

        It is what `Curvature.sampling_error` is made of: of several products over the same parameters the
        sum, of products over parts of them the mean.
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

    def inverse_cost(self, tikhonov: "Tikhonov") -> InverseCost:
        """What `damped` takes: by making it, unless a block knows without."""
        held = tensors_in(self.damped(1.0, tikhonov))
        square = [t for t in held if t.dim() == 2 and t.shape[0] == t.shape[1]]
        return InverseCost(
            sum(t.numel() for t in held),
            sum(cholesky_inverse_cost(len(t)) for t in square),
            sum(self.size * t.shape[-1] for t in held if t.dim() > 1),
        )

    def probe(self) -> list[Tensor]:
        """A few scalars that are finite only if the moments are."""
        return [value.sum() for value in _tensors(self)]


def _tensors(moments: Moments) -> list[Tensor]:
    values = [getattr(moments, f.name) for f in fields(moments)]  # type: ignore[arg-type]
    return [value for value in values if isinstance(value, Tensor)]


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

    def count_by_vector(self) -> None:
        """Let every vector count 1 in the parts that are means, so that sums of ranks can be added."""
        ...

    def parts(self) -> list[Part]:
        """The sums that were made so far, of an average without an old value: to be summed over ranks.

        After something was added: all ranks have the same shapes.
        """
        ...

    def counts(self) -> list[float]:
        """How much the parts that are means are of, in a unit that all ranks have in common."""
        ...

    def recount(self, counts: Sequence[float]) -> None:
        """Take over the sums of that over all ranks, before the parts are summed.

        The parts may be others then, of a unit that this rank has not used.
        """
        ...


class Block(ABC):
    """How the curvature of a unit is approximated; immutable, holds settings only."""

    moments: ClassVar[type[Moments]]
    """What it estimates."""

    @abstractmethod
    def observe(self, taps: Taps, share: float, weight: float) -> Moments:
        """The moments of one backward pass; those of several passes are added, field by field."""

    def describe(self, rows: int, columns: int) -> str:
        """What it is, in a word or two, for `kronfac.plan`."""
        return f"{type(self).__name__.removesuffix('Block')} ({rows}, {columns})"

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
        if self._sum is None:
            assert self._old is not None
            return self._old
        if self._old is None or self._decay == 0:
            return self._sum
        return _combine(self._old, self._decay, self._sum, 1 - self._decay)

    def count_by_vector(self) -> None:
        """Nothing: the sums are no means."""

    def parts(self) -> list[Part]:
        """The fields of the sum."""
        assert self._sum is not None
        return parts_of(self._sum)

    def counts(self) -> list[float]:
        """None: the sums are no means."""
        return []

    def recount(self, counts: Sequence[float]) -> None:
        """Nothing: the sums are no means."""


def vectors_counted(weight: float, each: float | None) -> float:
    """The number of vectors, from what all of them and what each counts; 0 if they count nothing."""
    return float(round(weight / each)) if each else 0.0


def parts_of(moments: Moments) -> list[Part]:
    """The tensors of moments, and whether they are symmetric."""
    values = ((f.name, getattr(moments, f.name)) for f in fields(moments))  # type: ignore[arg-type]
    symmetric = moments.symmetric
    return [(t, name in symmetric) for name, t in values if isinstance(t, Tensor)]


def blend(old: Moments | None, new: M, decay: float) -> M:
    """decay · old + (1 − decay) · new; the new one if there is no old one of its kind."""
    if decay == 0 or not isinstance(old, type(new)) or not _alike(old, new):
        return new
    return _combine(old, decay, new, 1 - decay)


def _alike(a: Moments, b: Moments) -> bool:
    """Whether two moments of one kind are of the same sizes, and on the same side of a product."""
    for f in fields(a):  # type: ignore[arg-type]
        left, right = getattr(a, f.name), getattr(b, f.name)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            same = left.shape == right.shape
        elif isinstance(left, Moments) and isinstance(right, Moments):
            same = _alike(left, right)
        else:
            same = left == right
        if not same:
            return False
    return True


def _combine(a: M, x: float, b: M, y: float) -> M:
    """x a + y b, tensor by tensor; what else there is, such as sizes, is the same in both."""
    values: dict[str, Any] = {}
    for f in fields(a):  # type: ignore[arg-type]
        left, right = getattr(a, f.name), getattr(b, f.name)
        if isinstance(left, Tensor):
            values[f.name] = left * x + right * y
        else:
            values[f.name] = _combine(left, x, right, y) if isinstance(left, Moments) else left
    return type(a)(**values)
