"""A Kronecker-factored block: A ⊗ G from the second moments of inputs and output gradients [MG15 §3, §5].

If an example uses V at several places or several times, there are two ways to factorise (Eschenhagen et
al. 2023):

- expand: every place counts as an example. A is the mean of ā āᵀ over all places of all examples, G the
  sum of g gᵀ over them, which is not divided by the number of places;
- reduce: the places of an example are combined first. A comes from the mean of its ā, G from the sum of
  its g.

With one place per example both are the same. In very wide layers a factor may be kept as its diagonal.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from kronfac.curvature.block import (
    Average,
    Block,
    FactoredMoments,
    Moments,
    Operator,
    Product,
    traces,
)
from kronfac.curvature.taps import GroupedTap, Rows, SummedGradient, Tap, Taps
from kronfac.curvature.tikhonov import ExactTikhonov, FactoredTikhonov, Tikhonov
from kronfac.errors import NotPositiveDefiniteError
from kronfac.linalg import InverseInEigenbasis, KroneckerProduct, eigh

Sharing = Literal["expand", "reduce"]
MANY = 4
"""With more uses than this, their vectors are concatenated: one large product is faster than many small."""


@dataclass(frozen=True)
class KroneckerMoments(KroneckerProduct, FactoredMoments):
    """A = E[ā āᵀ] (columns, columns) and G = E[g gᵀ] (rows, rows), each perhaps as its diagonal."""

    symmetric: ClassVar[tuple[str, ...]] = ("A", "G")

    def damped(self, gamma: float, tikhonov: Tikhonov) -> Operator:
        """(A + πγI)⁻¹ ⊗ (G + γ/π I)⁻¹, or (A ⊗ G + γ²I)⁻¹ for the exact form."""
        if isinstance(tikhonov, ExactTikhonov):
            return Eigenbasis(eigen(self.A, "A"), eigen(self.G, "G")).damped(self, gamma, tikhonov)
        return super().damped(gamma, tikhonov)

    def shifted(self, gamma: float, tikhonov: Tikhonov) -> list[tuple[Tensor, Tensor, str]]:
        assert isinstance(tikhonov, FactoredTikhonov)
        shift_A, shift_G = tikhonov.shifts(self.A, self.G, gamma)
        return [(self.A, shift_A, "A"), (self.G, shift_G, "G")]

    def assembled(self, inverses: Sequence[Tensor]) -> KroneckerProduct:
        return KroneckerProduct(*inverses)

    def trace(self) -> Tensor:
        """tr(A) tr(G), which may be larger than the dtype of the factors can hold."""
        return traces(self.A) * traces(self.G)

    def factor_traces(self) -> Tensor:
        """tr(A) tr(G), with the mean in place of the trace for a factor that is kept as its diagonal.

        Elements of a diagonal are inverted one by one. The inverse of a mean over n examples is too large
        by a factor of about 1 + 1/n, not 1 + d/n.
        """
        A, G = (traces(M) / (len(M) if M.dim() == 1 else 1) for M in (self.A, self.G))
        return A * G

    dense = KroneckerProduct.to_dense

    @property
    def size(self) -> int:
        return len(self.A) * len(self.G)


Eigen = tuple[Tensor, Tensor | None]
"""Eigenvalues, and eigenvectors unless the matrix is diagonal already."""


def eigen(M: Tensor, name: str) -> Eigen:
    """The eigendecomposition of a factor, which may be given by its diagonal.

    Raises:
        NonFiniteError: there is none.
    """
    return (M.clamp(min=0), None) if M.dim() == 1 else eigh(M, name)


class Eigenbasis:
    """The eigenbasis E_A ⊗ E_G of A ⊗ G, the same for all γ, and the eigenvalues S = s_G s_Aᵀ."""

    def __init__(self, A: Eigen, G: Eigen) -> None:
        (self._s_A, self._E_A), (self._s_G, self._E_G) = A, G
        # float32 holds factors of 1e20, but not their product.
        largest = torch.finfo(self._s_A.dtype).max
        self._S = torch.outer(self._s_G, self._s_A).clamp_(max=largest)

    def damped(
        self, moments: KroneckerMoments, gamma: float, tikhonov: Tikhonov
    ) -> InverseInEigenbasis:
        """The inverse of A ⊗ G with damped eigenvalues.

        Raises:
            NotPositiveDefiniteError: γ is too small for the precision of a singular A ⊗ G.
        """
        if isinstance(tikhonov, FactoredTikhonov):
            shift_A, shift_G = tikhonov.shifts(moments.A, moments.G, gamma)
            d_A, d_G = (self._s_A + shift_A) * shift_G, self._s_G * shift_A
        else:
            d_A, d_G = torch.full_like(self._s_A, gamma**2), torch.zeros_like(self._s_G)
        if not bool((d_A.min() > 0) & d_A.isfinite().all() & d_G.isfinite().all()):
            raise NotPositiveDefiniteError(
                f"A ⊗ G ({moments.size} parameters) has no damping at γ = {gamma:.3g}, in {d_A.dtype}."
            )
        return InverseInEigenbasis(self._E_A, self._E_G, self._S, d_A, d_G)


class FactoredBlock(Block):
    """A block of two factors: A from one side of V's uses, G from the other."""

    diagonal_inputs: bool = False
    diagonal_grads: bool = False

    @abstractmethod
    def vectors(self, taps: Taps) -> tuple[Sequence[Rows], Sequence[Tensor]]:
        """ā and g, each (…, vectors, features), by use."""

    def observe(self, taps: Taps, weight: float) -> Moments:
        average = self.average(None, 0.0)
        average.add(taps, 1.0, weight)
        return average.value()

    def average(self, old: Moments | None, decay: float) -> "FactorAverage":
        return FactorAverage(self, old, decay)


class FactorAverage(Average):
    """ε · old + (1 − ε) · (mean of ā āᵀ, weighted sum of g gᵀ)."""

    def __init__(self, block: FactoredBlock, old: Any, decay: float) -> None:
        self._block = block
        A, G = (None, None) if old is None else (old.A, old.G)
        self.products = (
            Product(A, decay, block.diagonal_inputs, symmetric=True),
            Product(G, decay, block.diagonal_grads, symmetric=True),
        )

    def add(self, taps: Taps, each: float, weight: float) -> None:
        uses = uses_of(taps)
        if uses:
            a, g = self._block.vectors(uses)
            inputs, grads = self.products
            if transposed(uses):  # ā belongs to the rows
                inputs, grads = grads, inputs
            inputs.add_to_mean(a, each=each)
            for y in g:
                grads.add(y, y, weight)

    def value(self) -> Moments:
        A, G = self.products
        return self._block.moments(A.value(), G.value())  # type: ignore[call-arg]


@dataclass(frozen=True)
class KroneckerBlock(FactoredBlock):
    """A ⊗ G.

    Args:
        sharing: `"expand"` or `"reduce"`, see above.
        diagonal_inputs: whether to keep only the diagonal of A.
        diagonal_grads: whether to keep only the diagonal of G.
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
        sides = ((rows, self.diagonal_grads), (columns, self.diagonal_inputs))
        listed = ", ".join(f"{n} diagonal" if diagonal else str(n) for n, diagonal in sides)
        reduced = ", reduce" if self.sharing == "reduce" else ""
        return f"Kronecker ({listed}){reduced}"

    def vectors(self, taps: Taps) -> tuple[Sequence[Rows], Sequence[Tensor]]:
        """The vectors ā and g whose second moments the factors are, each (vectors, features), by use."""
        uses = [tap for tap in uses_of(taps) if isinstance(tap, Tap)]
        assert len({tap.transposed for tap in uses}) <= 1, "V and Vᵀ were both used"
        if self.sharing == "expand":
            a = [tap.input_rows() for tap in uses]
            g = [tap.grad_rows() for tap in uses]
            return (_together(a), _together(g)) if len(uses) > MANY else (a, g)
        places = sum(tap.places() for tap in uses)
        total, g_total = sum(tap.input_sums() for tap in uses), sum(t.grads.sum(1) for t in uses)
        assert isinstance(total, Tensor)
        assert isinstance(g_total, Tensor)
        return [total / places], [g_total]


def uses_of(taps: Taps) -> list[Tap | GroupedTap]:
    """The uses of a unit with a Kronecker-factored block."""
    assert not isinstance(taps, SummedGradient), "a Kronecker block needs the uses of its unit"
    uses = [tap for tap in taps if isinstance(tap, (Tap, GroupedTap))]
    assert len(uses) == len(taps), "a Kronecker block needs inputs and gradients of every use"
    return uses


def transposed(uses: Sequence[Tap | GroupedTap]) -> bool:
    """Whether Vᵀ was multiplied, not V."""
    return isinstance(uses[0], Tap) and uses[0].transposed


def _together(rows: Sequence[Rows]) -> list[Any]:
    """One tensor instead of many: each step of a recurrent layer is a use."""
    tensors = [x for x in rows if isinstance(x, Tensor)]
    return [torch.cat(tensors)] if len(tensors) == len(rows) else list(rows)
