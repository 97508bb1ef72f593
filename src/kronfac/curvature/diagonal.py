"""A diagonal block: the mean squared gradient of every parameter, E[(Σ_places g āᵀ)²].

If the uses of a parameter are not recorded, only its gradient summed over the examples is known. Its square
is an unbiased estimate: targets are drawn independently for each term, and scores have mean zero, so that
products of different examples vanish on average. But one draw has a relative error of √2, however many
examples there are. The moving average reduces that to about a fifth.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import Block, Moments
from kronfac.curvature.taps import Tap, Taps, gradients_of_examples
from kronfac.curvature.tikhonov import Tikhonov
from kronfac.errors import NonFiniteError
from kronfac.storage import Shapes, Storable


@dataclass(frozen=True)
class DiagonalOperator(Storable):
    """V ↦ D ⊙ V."""

    D: Tensor  # (rows, columns)

    def shapes(self, rows: int, columns: int) -> Shapes:
        return {"D": (rows, columns)}

    def mv(self, V: Tensor) -> Tensor:
        return V * self.D

    def to_dense(self) -> Tensor:
        return torch.diag(self.D.mT.reshape(-1))


@dataclass(frozen=True)
class DiagonalMoments(DiagonalOperator, Moments):
    """D, the diagonal of the curvature."""

    def damped(self, gamma: float, tikhonov: Tikhonov) -> DiagonalOperator:
        """1 / (D + γ²); a diagonal needs no factored damping."""
        inverse = (self.D + gamma**2).reciprocal_()
        if not bool(inverse.isfinite().all()):
            raise NonFiniteError("The diagonal is not finite, or it is 0 and has no damping.")
        return DiagonalOperator(inverse)

    def trace(self) -> Tensor:
        return self.D.sum(dtype=torch.float64)

    dense = DiagonalOperator.to_dense

    @property
    def size(self) -> int:
        return self.D.numel()


@dataclass(frozen=True)
class DiagonalBlock(Block):
    """The curvature of every parameter, without any correlation."""

    moments: ClassVar[type[Moments]] = DiagonalMoments

    def describe(self, rows: int, columns: int) -> str:
        return "diagonal"

    def observe(self, taps: Taps, weight: float) -> DiagonalMoments:
        """Σ_examples (Σ_places g āᵀ)²."""
        if isinstance(taps, list) and len(taps) == 1 and _one_place(taps[0]):
            return DiagonalMoments(taps[0].squares() * weight)
        # Uses of the same example add up before they are squared.
        total = sum(V.square().sum(dim=0) for V in gradients_of_examples(taps))
        assert isinstance(total, Tensor)
        return DiagonalMoments(total * weight)


def _one_place(tap: object) -> bool:
    return isinstance(tap, Tap) and tap.grads.shape[1] == 1
