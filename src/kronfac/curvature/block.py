"""The curvature of one unit: its statistics and its damped inverse.

    taps → moments → operator
    block.average(old, decay).add(taps, …) …  .value() → moments.damped(γ) → .mv(V)

Taps are the inputs and gradients of a unit in one backward pass, see `taps.py`. Nothing here knows modules.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from kronfac.curvature.taps import OneHot, Rows, Taps
from kronfac.curvature.tikhonov import Tikhonov
from kronfac.errors import StateError, UnsupportedModelError
from kronfac.linalg import shifted_inverses
from kronfac.linalg.kronecker import add_gram
from kronfac.storage import Layout, Storable

Part = tuple[Tensor, bool]
"""A sum over examples, and whether it is a symmetric matrix (ranks then send one half of it)."""


@runtime_checkable
class Operator(Protocol):
    """A damped inverse of one unit's curvature: symmetric, positive definite, ready to multiply.

    A frozen dataclass of tensors and numbers that is a `Storable`: a run is saved with its inverse.
    """

    def mv(self, V: Tensor) -> Tensor:
        """The product with V (rows, columns): a new tensor, which the caller may overwrite."""

    def to_dense(self) -> Tensor:
        """The matrix itself, in the layout of vec(V), which stacks columns."""


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
        return InverseCost(*(x + y for x, y in zip(astuple(self), astuple(other), strict=True)))


def eigh_cost(n: int) -> float:
    """Multiplications of an eigendecomposition, about six times those of the inverse."""
    return 3.0 * n**3


class Moments(Storable, ABC):
    """The statistics of a unit's curvature: a frozen dataclass of tensors."""

    symmetric: ClassVar[tuple[str, ...]] = ()
    """Names of the fields that hold symmetric matrices (…, n, n), or only their diagonals (n,)."""

    @abstractmethod
    def damped(self, gamma: float, tikhonov: Tikhonov) -> Operator:
        """The inverse with damping strength γ [MG15 §6.3].

        Raises:
            NotPositiveDefiniteError, NonFiniteError: there is none.
        """

    @abstractmethod
    def trace(self) -> Tensor:
        """The trace of the curvature, float64."""

    def factor_traces(self) -> Tensor | None:
        """tr(A) tr(G) of a Kronecker product A ⊗ G, float64; None for other blocks.

        `Curvature.sampling_error` needs it. A sum of several products gives the sum, one product per group
        of parameters the mean.
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

        For a positive semi-definite matrix the trace is enough: the diagonal bounds all other elements.
        """
        return [_probe(M, symmetric) for M, symmetric in parts_of(self)]


def _probe(M: Tensor, symmetric: bool) -> Tensor:
    if symmetric and M.dim() == 2:
        return M.trace()  # one kernel
    return (M.diagonal(dim1=-2, dim2=-1) if symmetric and M.dim() > 1 else M).sum()


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


class FactoredMoments(Moments):
    """Moments whose inverse consists of the inverses of a few symmetric matrices, each with a shift."""

    @abstractmethod
    def shifted(self, gamma: float, tikhonov: Tikhonov) -> list[tuple[Tensor, Tensor, str]]:
        """The matrices (or their diagonals), what damping adds to their diagonals, and their names."""

    @abstractmethod
    def assembled(self, inverses: Sequence[Tensor]) -> Operator:
        """The inverse of the curvature from the inverses of these matrices."""

    def damped(self, gamma: float, tikhonov: Tikhonov) -> Operator:
        inverses = []
        for M in shifted_inverses(*zip(*self.shifted(gamma, tikhonov), strict=True)):
            if isinstance(M, Exception):
                raise M
            inverses.append(M)
        return self.assembled(inverses)


# --------------------------------------------------------------------------------------- moving averages


class Product:
    """ε · old + (1 − ε) · (sum or mean of x yᵀ), with ε and the weights folded into the products.

    On a CPU separate passes over memory would cost as much as the products themselves.

    Args:
        old: the average so far, which is only read.
        decay: ε; it counts as 0 without an old value.
        diagonal: whether only the diagonal is kept.
        symmetric: whether x is y.
    """

    def __init__(
        self, old: Tensor | None, decay: float, diagonal: bool = False, symmetric: bool = False
    ) -> None:
        self._old = old if decay else None
        self._default = old
        self._decay = 0.0 if old is None else decay
        self._diagonal, self._symmetric = diagonal, symmetric
        self._sum: Tensor | None = None
        self._apart = False
        self.count = 0.0
        """Vectors in the mean; 0 for a sum."""

    @property
    def empty(self) -> bool:
        """Whether nothing was added."""
        return self._sum is None

    def add(self, x: Rows, y: Rows, weight: float) -> None:
        """Add weight · Σ x yᵀ over the vectors (…, vectors, features) of x and y."""
        if isinstance(x, OneHot):
            squares = x.squares()
            self.add_sum(squares if self._diagonal else torch.diag(squares), weight)
            return
        one = x is y
        x, y = (z if isinstance(z, Tensor) else z.all() for z in (x, y))
        if self._diagonal:
            self.add_sum(torch.einsum("ni,ni->i", x, y), weight)
        elif one and x.dim() == 2:
            before, decay = (self._sum, 1.0) if self._sum is not None else (self._old, self._decay)
            self._sum = add_gram(before, x, decay, weight * (1 - self._decay))
        else:
            self.add_sum(x.mT @ y, weight)

    def add_sum(self, new: Tensor, weight: float) -> None:
        """Add weight · new, which is overwritten."""
        new = new.mul_(weight * (1 - self._decay))
        if self._sum is not None:
            self._sum.add_(new)
        else:
            self._sum = new if self._old is None else new.add_(self._old, alpha=self._decay)

    def add_to_mean(
        self, xs: Sequence[Rows], ys: Sequence[Rows] | None = None, each: float = 1.0
    ) -> None:
        """Add x yᵀ to the mean for more vectors, each with the weight `each`; y = x by default."""
        more = each * sum(x.shape[-2] for x in xs)
        if not more and self._sum is not None:
            return
        share = more / (self.count + more) if more else 0.0
        self.count += more
        if self._sum is not None:
            self._sum.mul_(1 - share)
            if self._old is not None:
                self._sum.add_(self._old, alpha=share * self._decay)
        for x, y in zip(xs, xs if ys is None else ys, strict=True):
            self.add(x, y, each / self.count if more else 0.0)

    def summand(self, total: float) -> Part:
        """The part to be summed over the ranks, without the old value.

        A mean is multiplied by this rank's share of the `total` number of vectors.
        """
        if self._sum is None:
            assert self._default is not None
            self._sum = torch.zeros_like(self._default)
        elif self._old is not None:
            self._sum.sub_(self._old, alpha=self._decay)
        if total:
            self._sum.mul_(self.count / total)
        self._apart = True
        return self._sum, self._symmetric

    def value(self) -> Tensor:
        """The average with everything that was added; the old one if nothing was."""
        if self._apart and self._sum is not None and self._old is not None:
            self._sum.add_(self._old, alpha=self._decay)
        self._apart = False
        value = self._default if self._sum is None else self._sum
        if value is None:
            raise UnsupportedModelError(
                "A unit was not used by any of the examples that the statistics are taken on. Choose "
                "a larger statistics_fraction, or freeze what the loss does not depend on."
            )
        return value


class Summands:
    """Statistics that are summed over the ranks, as a list of products."""

    products: Sequence[Product] = ()

    def counts(self) -> list[float]:
        """The number of vectors in each part, for parts that are means; 0 for sums."""
        return [product.count for product in self.products]

    def parts(self, totals: Sequence[float]) -> list[Part]:
        """The tensors to be summed over the ranks: see `Product.summand`."""
        return [product.summand(n) for product, n in zip(self.products, totals, strict=True)]


class Average(Summands, ABC):
    """Collects the taps of one step into decay · old + (1 − decay) · (sums and means over the taps)."""

    @abstractmethod
    def add(self, taps: Taps, each: float, weight: float) -> None:
        """Add the statistics of one pass.

        Args:
            taps: of this unit.
            each: the weight of every vector ā in means; 0 in further backward passes of the same forward
                pass, which counted them already.
            weight: the factor of Σ g gᵀ.
        """

    @abstractmethod
    def value(self) -> Moments:
        """The average with everything that was added."""


class Block(ABC):
    """How the curvature of a unit is approximated; immutable, holds settings only."""

    moments: ClassVar[type[Moments]]
    """The class of its statistics."""

    @abstractmethod
    def observe(self, taps: Taps, weight: float) -> Moments:
        """The moments of one backward pass. Those of several passes are added, field by field."""

    def describe(self, rows: int, columns: int) -> str:
        """A word or two for `kronfac.plan`."""
        return f"{type(self).__name__.removesuffix('Block')} ({rows}, {columns})"

    def average(self, old: Moments | None, decay: float) -> Average:
        """A new moving average that starts from `old`, which is only read."""
        return SumAverage(self, old, decay)


class SumAverage(Average):
    """decay · old + (1 − decay) Σ observe(taps), for moments that are linear in the data."""

    def __init__(self, block: Block, old: Moments | None, decay: float) -> None:
        self._block, self._old, self._decay = block, old, decay
        self._sum: Moments | None = None

    def add(self, taps: Taps, each: float, weight: float) -> None:
        new = self._block.observe(taps, weight)
        self._sum = new if self._sum is None else _combine(self._sum, 1.0, new, 1.0)

    def value(self) -> Moments:
        if self._sum is None:
            assert self._old is not None
            return self._old
        if self._old is None or self._decay == 0:
            return self._sum
        return _combine(self._old, self._decay, self._sum, 1 - self._decay)

    def parts(self, totals: Sequence[float]) -> list[Part]:
        assert self._sum is not None
        return parts_of(self._sum)


S = TypeVar("S", bound=Storable)


def _combine(a: S, x: float, b: S, y: float) -> S:
    """x a + y b, tensor by tensor; fields that are no tensors, such as sizes, come from b."""
    values: dict[str, Any] = {}
    for f in fields(b):  # type: ignore[arg-type]
        left, right = getattr(a, f.name), getattr(b, f.name)
        if isinstance(left, Tensor) and isinstance(right, Tensor):
            values[f.name] = left * x + right * y
        else:
            values[f.name] = _combine(left, x, right, y) if isinstance(left, Storable) else right
    return type(b)(**values)
