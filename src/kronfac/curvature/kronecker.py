"""A Kronecker-factored block: A ⊗ G from the second moments of inputs and output gradients [MG15 §3, §5].

If one example uses V at several places, or V is used several times, there are two ways to factorise
(Eschenhagen et al. 2023):

- expand: every place counts as an example of its own: A = mean of ā āᵀ over all places of all examples,
  G = Σ over them of g gᵀ, which is not divided by the number of places;
- reduce: an example's places are taken together first: A from the mean of its ā, G from the sum of its g.

With one place they are the same. Either side may be kept as its diagonal, for very wide layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from kronfac.curvature.block import (
    Block,
    InverseCost,
    Moments,
    Operator,
    Part,
    cholesky_inverse_cost,
    eigh_cost,
    vectors_counted,
)
from kronfac.curvature.taps import OneHot, Rows, SummedGradient, Tap, Taps
from kronfac.curvature.tikhonov import ExactTikhonov, Tikhonov
from kronfac.errors import UnsupportedModelError
from kronfac.linalg import EigenKroneckerSum, KroneckerProduct, eigh, shifted_inverse
from kronfac.linalg.kronecker import kron
from kronfac.linalg.spd import add_gram
from kronfac.storage import Shapes

Sharing = Literal["expand", "reduce"]
MANY = 4
"""Uses from which their vectors are put together: a product for each would be small."""


@dataclass(frozen=True)
class KroneckerMoments(Moments):
    """The factors; a side that is kept as its diagonal has one dimension."""

    symmetric: ClassVar[tuple[str, ...]] = ("A", "G")
    A: Tensor  # E[ā āᵀ] (columns, columns)
    G: Tensor  # E[g gᵀ] (rows, rows)

    def shapes(self, rows: int, columns: int) -> Shapes:
        """Square sides, or their diagonals."""
        return {"A": [(columns, columns), (columns,)], "G": [(rows, rows), (rows,)]}

    def damped(self, gamma: float, tikhonov: Tikhonov) -> Operator:
        """(A + πγI)⁻¹ ⊗ (G + γ/π I)⁻¹, or (A ⊗ G + γ²I)⁻¹ for the exact form."""
        if isinstance(tikhonov, ExactTikhonov):
            (s_A, E_A), (s_G, E_G) = (_eigen(M, name) for M, name in ((self.A, "A"), (self.G, "G")))
            return EigenKroneckerSum(E_A, s_A, E_G, s_G, gamma**2)
        shifts = tikhonov.shifts(self.A, self.G, gamma)
        A, G = map(shifted_inverse, (self.A, self.G), shifts, ("A", "G"))
        return KroneckerProduct(A, G)

    def trace(self) -> Tensor:
        """tr(A) tr(G), which may be larger than the dtype of the factors can hold."""
        return _trace(self.A) * _trace(self.G)

    def factor_traces(self) -> Tensor:
        """tr(A) tr(G), with the mean in place of the trace for a side that is kept as its diagonal.

        The inverse of a mean of n numbers is too large by a share of about 1/n, not of d/n: each number is
        inverted by itself.
        """
        traces = [_trace(M) / (len(M) if M.dim() == 1 else 1) for M in (self.A, self.G)]
        return traces[0] * traces[1]

    def dense(self) -> Tensor:
        """A ⊗ G."""
        return kron(*(torch.diag(M) if M.dim() == 1 else M for M in (self.A, self.G)))

    def probe(self) -> list[Tensor]:
        """The traces: if they are finite, so are the diagonals, which bound the rest."""
        return [M.sum() if M.dim() == 1 else M.trace() for M in (self.A, self.G)]

    def inverse_cost(self, tikhonov: Tikhonov) -> InverseCost:
        """The inverses of both sides; for the exact form their eigenvectors and eigenvalues."""
        if isinstance(tikhonov, ExactTikhonov):
            sides = [len(M) for M in (self.A, self.G)]
            made = sum(eigh_cost(len(M)) for M in (self.A, self.G) if M.dim() == 2)
            numbers = sum(n * n + n for n in sides)
            return InverseCost(numbers, made, 2 * self.size * sum(sides))
        full = [len(M) for M in (self.A, self.G) if M.dim() == 2]
        return InverseCost(
            self.A.numel() + self.G.numel(),
            sum(map(cholesky_inverse_cost, full)),
            self.size * (sum(full) + 2 - len(full)),
        )

    @property
    def size(self) -> int:
        """The number of parameters."""
        return len(self.A) * len(self.G)


def _trace(M: Tensor) -> Tensor:
    return (M if M.dim() == 1 else M.diagonal()).sum(dtype=torch.float64)


def _eigen(M: Tensor, name: str) -> tuple[Tensor, Tensor]:
    if M.dim() == 1:
        return M, torch.eye(len(M), dtype=M.dtype, device=M.device)
    return eigh(M, name)


@dataclass(frozen=True)
class KroneckerBlock(Block):
    """A ⊗ G.

    Args:
        sharing: `"expand"` or `"reduce"`, see above.
        diagonal_inputs: whether A is kept as its diagonal.
        diagonal_grads: whether G is.
    """

    moments: ClassVar[type[Moments]] = KroneckerMoments
    sharing: Sharing = "expand"
    diagonal_inputs: bool = False
    diagonal_grads: bool = False

    def __post_init__(self) -> None:
        if self.sharing not in get_args(Sharing):
            raise ValueError(
                f"KroneckerBlock's sharing is one of {get_args(Sharing)}; got {self.sharing!r}."
            )

    def describe(self, rows: int, columns: int) -> str:
        """Its name, and the sizes of G and A."""
        sides = ((rows, self.diagonal_grads), (columns, self.diagonal_inputs))
        listed = ", ".join(f"{n} diagonal" if diagonal else str(n) for n, diagonal in sides)
        reduced = ", reduce" if self.sharing == "reduce" else ""
        return f"Kronecker ({listed}){reduced}"

    def observe(self, taps: Taps, share: float, weight: float) -> KroneckerMoments:
        """The moments of one backward pass."""
        average = KroneckerAverage(self, None, 0.0)
        average.add(taps, True, share, weight)
        return average.value()

    def average(self, old: Moments | None, decay: float) -> "KroneckerAverage":
        """The moving average, with decay and weight folded into the products that make it."""
        assert old is None or isinstance(old, KroneckerMoments)
        return KroneckerAverage(self, old, decay)

    def rows(self, taps: Sequence[Tap]) -> tuple[list[Rows], list[Tensor]]:
        """The vectors ā and g whose second moments the factors are, each (vectors, features), by use."""
        if self.sharing == "expand":
            a = [tap.input_rows() for tap in taps]
            g = [tap.grad_rows() for tap in taps]
            return (_together(a), _together(g)) if len(taps) > MANY else (a, g)
        places = sum(tap.places() for tap in taps)
        total, g_total = sum(tap.input_sums() for tap in taps), sum(t.grads.sum(1) for t in taps)
        assert isinstance(total, Tensor)
        assert isinstance(g_total, Tensor)
        return [total / places], [g_total]


def _together(rows: Sequence[Rows]) -> list[Any]:
    """One tensor in place of many: the steps of a recurrent layer are a use each."""
    tensors = [x for x in rows if isinstance(x, Tensor)]
    return [torch.cat(tensors)] if len(tensors) == len(rows) else list(rows)


class KroneckerAverage:
    """ε · old + (1 − ε) · (weighted sums of products), without a pass over memory of its own.

    On a CPU the passes over memory that this saves cost as much as the products themselves.
    """

    def __init__(self, block: KroneckerBlock, old: KroneckerMoments | None, decay: float) -> None:
        self._block = block
        self._counted = 0.0
        self._each: float | None = None
        self._transposed = False
        self.sides = (
            Product(None if old is None else old.A, decay, block.diagonal_inputs),
            Product(None if old is None else old.G, decay, block.diagonal_grads),
        )

    def add(self, taps: Taps, first: bool, share: float, weight: float) -> None:
        """Add what one backward pass shows."""
        uses = direct_or_transposed(taps)
        if not uses:
            return
        a, g = self._block.rows(uses)
        self._transposed = uses[0].transposed
        inputs, grads = self._sides
        count = sum(map(len, a))
        if first and count:
            # A mean over the vectors of all passes, however many places their examples have.
            self._each = share / count if self._each is None else self._each
            self._counted += self._each * count
            for x in a:
                inputs.add(x, x, self._each)
        for y in g:
            grads.add(y, y, weight)

    @property
    def _sides(self) -> "tuple[Product, Product]":
        """Where ā and where g go: for a transposed use ā is on the side of the rows."""
        A, G = self.sides
        return (G, A) if self._transposed else (A, G)

    def value(self) -> KroneckerMoments:
        """The average with everything that was added.

        The mean is one over the passes in which the unit was used, of which there may be fewer than all.
        """
        inputs, grads = self._sides
        mean, total = inputs.value(self._counted), grads.value()
        return KroneckerMoments(total, mean) if self._transposed else KroneckerMoments(mean, total)

    def begin(self, zeros: KroneckerMoments, transposed: bool) -> None:
        """Begin the sums of a unit that is not used on this rank."""
        self._transposed = transposed
        for side, zero in zip(self.sides, (zeros.A, zeros.G), strict=True):
            side.begin(zero)

    def count_by_vector(self) -> None:
        """Let every vector ā count 1."""
        if self._each:
            self._sides[0].sum.div_(self._each)
            self._counted, self._each = vectors_counted(self._counted, self._each), 1.0

    def parts(self) -> list[Part]:
        """Both sums, A first."""
        return [(side.sum, True) for side in self.sides]

    def counts(self) -> list[float]:
        """The number of vectors, by the direction in which the unit is used."""
        count = vectors_counted(self._counted, self._each)
        return [0.0, count] if self._transposed else [count, 0.0]

    def recount(self, counts: Sequence[float]) -> None:
        """Take over the numbers on all ranks: every vector counts the same, on whichever it is."""
        direct, transposed = counts
        self._transposed, self._counted = transposed > direct, max(counts)


def direct_or_transposed(taps: Taps) -> list[Tap]:
    """The uses of a unit whose factors are taken from ā and g, all in the same direction."""
    assert not isinstance(taps, SummedGradient), "a Kronecker block needs the uses of its unit"
    uses = [tap for tap in taps if isinstance(tap, Tap)]
    assert len(uses) == len(taps), "a Kronecker block needs inputs and gradients of every use"
    assert len({tap.transposed for tap in uses}) <= 1, "V and Vᵀ were both used"
    return uses


class Product:
    """A moving average of Σ weight · x yᵀ, or of its diagonal."""

    def __init__(self, old: Tensor | None, decay: float, diagonal: bool = False) -> None:
        """ε = `decay`; without an old value the new one counts in full."""
        self._old, self._decay = old, 0.0 if old is None else decay
        self.diagonal = diagonal
        self._sum: Tensor | None = None

    def add(self, x: Rows, y: Rows, weight: float) -> None:
        """Add weight · Σ x yᵀ over the rows of x and y."""
        weight *= 1 - self._decay
        if isinstance(x, OneHot):
            self._add_one_hot(x, weight)
            return
        one = x is y
        x, y = (z if isinstance(z, Tensor) else z.all() for z in (x, y))
        if self.diagonal:
            self._add(torch.einsum("ni,ni->i", x, y) * weight)
        elif one:
            if self._sum is None:
                self._sum = add_gram(self._old if self._decay else None, x, self._decay, weight)
            else:
                self._sum = add_gram(self._sum, x, 1.0, weight)
        elif self._sum is not None:
            self._sum.addmm_(x.mT, y, alpha=weight)
        elif self._old is None or self._decay == 0:
            self._sum = (x.mT @ y).mul_(weight)
        else:
            self._sum = torch.addmm(self._old, x.mT, y, beta=self._decay, alpha=weight)

    def _add_one_hot(self, x: OneHot, weight: float) -> None:
        squares = x.squares() * weight
        self._add(squares if self.diagonal else torch.diag(squares))

    def _add(self, new: Tensor) -> None:
        if self._sum is not None:
            self._sum.add_(new)
        elif self._old is None or self._decay == 0:
            self._sum = new
        else:
            self._sum = torch.add(new, self._old, alpha=self._decay)

    def begin(self, zero: Tensor) -> None:
        """Begin with nothing."""
        self._sum = zero

    @property
    def sum(self) -> Tensor:
        """What was added so far."""
        assert self._sum is not None
        return self._sum

    def value(self, share: float = 1.0) -> Tensor:
        """The average with everything that was added, which had this share of the weight."""
        if self._sum is None:
            if self._old is None:
                raise UnsupportedModelError(
                    "A unit was not used by any of the examples that the statistics are taken on. Choose "
                    "a larger statistics_fraction, or freeze what the loss does not depend on."
                )
            return self._old
        if abs(share - 1) < 1e-9:
            return self._sum
        if self._old is None or self._decay == 0:
            return self._sum / share
        return (self._sum - self._decay * self._old) / share + self._decay * self._old
