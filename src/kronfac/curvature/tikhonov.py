"""Tikhonov damping of Kronecker factors [MG15 §6.3, §6.6].

The exact form adds γ² to the diagonal of A ⊗ G, with γ² in place of the paper's λ + η. The factored form
adds a part to each factor, so that the result is a single Kronecker product:

    (A + π γ I) ⊗ (G + γ/π I)

π spreads the damping so that a bound on the difference between the two forms is smallest:
π = (‖A ⊗ I‖ / ‖I ⊗ G‖)^½, in the trace norm.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kronfac.linalg import shift_diagonal

Norm = Literal["trace", "one"]


@dataclass(frozen=True)
class FactoredTikhonov:
    """(A + π γ I) ⊗ (G + γ/π I), the paper's choice: π by the trace norm, or π = 1 for `norm="one"`."""

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
        ratio = A.new_ones(()) if self.norm == "one" else pi(A, G)
        return ratio * gamma, gamma / ratio


@dataclass(frozen=True)
class ExactTikhonov:
    """A ⊗ G + γ² I, not factored: eqn. 6 of the paper with γ² in place of λ + η."""


Tikhonov = FactoredTikhonov | ExactTikhonov


def pi(A: Tensor, G: Tensor) -> Tensor:
    """π = ((tr A / dim A) / (tr G / dim G))^½ for positive semi-definite A and G."""
    # A layer that no gradient reaches has G = 0. Then any finite π will do.
    tiny = torch.finfo(A.dtype).tiny ** 0.5
    # Root by root: inputs of 1e10 make tr A 1e20, and the ratio of that to `tiny` is infinite in float32.
    return mean_eigenvalue(A).clamp(min=tiny).sqrt() / mean_eigenvalue(G).clamp(min=tiny).sqrt()


def mean_eigenvalue(M: Tensor) -> Tensor:
    """tr M / dim M of a factor, which may be given by its diagonal (dim,)."""
    return M.mean() if M.dim() == 1 else M.diagonal().mean()
