"""Tikhonov damping of Kronecker factors [MG15 §6.3, §6.6].

The exact form adds γ² to the diagonal of A ⊗ G, γ² standing for λ + η. The factored form adds a
part to each factor, so that a single Kronecker product remains:

    (A + π γ I) ⊗ (G + γ/π I)

π spreads the damping so that a bound on the difference between the two forms is smallest:
π = (‖A ⊗ I‖ / ‖I ⊗ G‖)^½ in some norm.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kronfac.errors import NonFiniteError
from kronfac.linalg import shift_diagonal

Norm = Literal["trace", "frobenius", "spectral", "one"]


@dataclass(frozen=True)
class FactoredTikhonov:
    """(A + π γ I) ⊗ (G + γ/π I), the paper's choice; `norm` is the one in π, or `"one"` for π = 1."""

    norm: Norm = "trace"

    def __post_init__(self) -> None:
        if self.norm not in get_args(Norm):
            raise ValueError(
                f"FactoredTikhonov's norm is one of {get_args(Norm)}; got {self.norm!r}."
            )

    def damp(self, A: Tensor, G: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
        """A + π γ I and G + γ/π I; a factor may be given, and is returned, as its diagonal."""
        shift_A, shift_G = self.shifts(A, G, gamma)
        return shift_diagonal(A, shift_A), shift_diagonal(G, shift_G)

    def shifts(self, A: Tensor, G: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
        """π γ and γ/π, for callers that add them in place."""
        ratio = pi(A, G, self.norm)
        return ratio * gamma, gamma / ratio

    def sizes(self, A: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
        """‖A ⊗ I‖ and ‖I ⊗ G‖, by the trace if π is 1."""
        norm = "trace" if self.norm == "one" else self.norm
        return _mean_size(A, norm), _mean_size(G, norm)


@dataclass(frozen=True)
class ExactTikhonov:
    """A ⊗ G + γ² I, not factored: eqn. 6 of the paper with γ² in place of λ + η.

    With γ² = λ + η it is that equation.
    """


Tikhonov = FactoredTikhonov | ExactTikhonov


def pi(A: Tensor, G: Tensor, norm: Norm = "trace") -> Tensor:
    """π = (‖A ⊗ I‖ / ‖I ⊗ G‖)^½ for positive semi-definite A and G.

    trace:     ((tr A / dim A) / (tr G / dim G))^½
    frobenius: ((‖A‖_F / (dim A)^½) / (‖G‖_F / (dim G)^½))^½
    spectral:  (‖A‖₂ / ‖G‖₂)^½
    """
    if norm == "one":
        return A.new_ones(())
    size_A, size_G = (_mean_size(M, norm) for M in (A, G))
    # A layer that no gradient reaches has G = 0: any π is as good as another, but not infinity.
    tiny = torch.finfo(A.dtype).tiny ** 0.5
    # Root by root: inputs of 1e10 make tr A 1e20, and the ratio of that to `tiny` is infinite in float32.
    return size_A.clamp(min=tiny).sqrt() / size_G.clamp(min=tiny).sqrt()


def _mean_size(M: Tensor, norm: Norm) -> Tensor:
    """The size of a factor, which may be given by its diagonal (dim,) alone."""
    if norm == "trace":
        return M.mean() if M.dim() == 1 else M.diagonal().mean()
    if M.dim() == 1:
        return M.norm() / len(M) ** 0.5 if norm == "frobenius" else M.max()
    if norm == "frobenius":
        # Squares of such entries are infinite too.
        norm_M: Tensor = torch.linalg.vector_norm(M, dtype=torch.float64)
        return norm_M.div(len(M) ** 0.5).to(M.dtype)
    try:
        largest: Tensor = torch.linalg.eigvalsh(M.double())[-1]
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise NonFiniteError(f"A factor ({len(M)} × {len(M)}) has no eigenvalues.") from error
    return largest.to(M.dtype)
