"""A dense block: E[v vᵀ] for the gradient v = vec(Σ_places g āᵀ) of an example.

For units with up to a few hundred parameters.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.base import Block, Moments, SummedGradient, Taps
from kronfac.curvature.damping import Tikhonov
from kronfac.linalg import add_to_diagonal, inverse
from kronfac.storage import Shapes, Storable


@dataclass(frozen=True)
class DenseOperator(Storable):
    """V ↦ (M + γ² I)⁻¹ vec(V)."""

    inverse: Tensor  # (size, size)

    def shapes(self, rows: int, columns: int) -> Shapes:
        """A matrix over vec(V)."""
        return {"inverse": (rows * columns, rows * columns)}

    def mv(self, V: Tensor) -> Tensor:
        """The product."""
        product = self.inverse @ V.mT.reshape(-1)
        return product.view(V.shape[1], V.shape[0]).mT.contiguous()

    def to_dense(self) -> Tensor:
        """The matrix."""
        return self.inverse


@dataclass(frozen=True)
class DenseMoments(Moments):
    """M."""

    M: Tensor  # (size, size), for vec(V), which stacks columns

    def shapes(self, rows: int, columns: int) -> Shapes:
        """A matrix over vec(V)."""
        return {"M": (rows * columns, rows * columns)}

    def damped(self, gamma: float, tikhonov: Tikhonov) -> DenseOperator:
        """(M + γ² I)⁻¹."""
        return DenseOperator(inverse(add_to_diagonal(self.M, self.M.new_tensor(gamma**2)), "M"))

    def trace(self) -> Tensor:
        """tr M."""
        return self.M.diagonal().sum(dtype=torch.float64)

    def dense(self) -> Tensor:
        """M."""
        return self.M

    @property
    def size(self) -> int:
        """The number of parameters."""
        return len(self.M)


@dataclass(frozen=True)
class DenseBlock(Block):
    """The whole curvature of a small unit."""

    moments: ClassVar[type[Moments]] = DenseMoments

    def observe(self, taps: Taps, share: float, weight: float) -> DenseMoments:
        """Σ_examples v vᵀ."""
        if isinstance(taps, SummedGradient):
            v = taps.V.mT.reshape(1, -1)
        else:
            total = sum(tap.gradients() for tap in taps)
            assert isinstance(total, Tensor)
            v = total.mT.reshape(len(total), -1)
        return DenseMoments((v.mT @ v) * weight)
