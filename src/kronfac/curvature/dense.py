"""A dense block: E[v vᵀ] for the gradient v = vec(Σ_places g āᵀ) of an example.

For units with up to a few hundred parameters. Larger units are divided into pieces of neighbouring rows of
V, each with its own matrix. The curvature between pieces is left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kronfac.curvature.block import Block, FactoredMoments, Moments, traces
from kronfac.curvature.taps import Taps, gradients_of_examples
from kronfac.curvature.tikhonov import Tikhonov
from kronfac.storage import Shapes, Storable

LIMIT = 512
"""The largest number of parameters in a piece: its matrix is inverted in a few milliseconds."""


def _vectors(V: Tensor, pieces: int, size: int) -> Tensor:
    """vec(V) of every piece, columns stacked, (pieces, …, size), from V (…, rows, columns)."""
    *others, rows, _ = V.shape
    each = -(-rows // pieces)
    padded = torch.nn.functional.pad(V, (0, 0, 0, each * pieces - rows))
    parts = padded.unflatten(-2, (pieces, each)).movedim(-3, 0)  # (pieces, …, each, columns)
    vectors: Tensor = parts.mT.reshape(pieces, *others, size)
    return vectors


def _matrix(vectors: Tensor, rows: int, columns: int) -> Tensor:
    """V (rows, columns) from vec(V) of every piece, (pieces, size)."""
    pieces = len(vectors)
    return vectors.view(pieces, columns, -1).mT.reshape(-1, columns)[:rows].contiguous()


def _pieces(rows: int, columns: int, limit: int) -> int:
    return min(math.ceil(rows * columns / limit), rows)


@dataclass(frozen=True)
class DenseMatrix(Storable):
    """V ↦ M vec(V), piece by piece."""

    M: Tensor  # (pieces, size, size), for the vec of every piece, which stacks columns
    rows: int
    columns: int

    def shapes(self, rows: int, columns: int) -> Shapes:
        return {"M": [("pieces", "size", "size")]}

    def mv(self, V: Tensor) -> Tensor:
        vectors = _vectors(V, len(self.M), self.M.shape[-1])
        return _matrix((self.M @ vectors.unsqueeze(-1)).squeeze(-1), *V.shape)

    def to_dense(self) -> Tensor:
        """M, with zeros between the pieces."""
        index = torch.arange(self.rows * self.columns, device=self.M.device)
        index = index.view(self.columns, self.rows).mT
        numbers = _vectors(index, len(self.M), self.M.shape[-1])
        valid = _vectors(torch.ones_like(index), len(self.M), self.M.shape[-1]) == 1  # not padding
        dense = self.M.new_zeros(index.numel(), index.numel())
        for part, number, kept in zip(self.M, numbers, valid, strict=True):
            at = number[kept]
            dense[at[:, None], at] = part[kept][:, kept]
        return dense


@dataclass(frozen=True)
class DenseMoments(DenseMatrix, FactoredMoments):
    """M of every piece."""

    symmetric: ClassVar[tuple[str, ...]] = ("M",)

    def shifted(self, gamma: float, tikhonov: Tikhonov) -> list[tuple[Tensor, Tensor, str]]:
        """M + γ² I."""
        return [(M, M.new_tensor(gamma**2), "M") for M in self.M]

    def assembled(self, inverses: Sequence[Tensor]) -> DenseMatrix:
        return DenseMatrix(torch.stack([*inverses]), self.rows, self.columns)

    def trace(self) -> Tensor:
        return traces(self.M).sum()

    dense = DenseMatrix.to_dense

    @property
    def size(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class DenseBlock(Block):
    """The whole curvature of a small unit, or of pieces of a larger one.

    Args:
        limit: the largest number of parameters in a piece, which has at least one row of V.
    """

    moments: ClassVar[type[Moments]] = DenseMoments
    limit: int = LIMIT

    def describe(self, rows: int, columns: int) -> str:
        pieces = _pieces(rows, columns, self.limit)
        return "dense" if pieces == 1 else f"dense, {pieces} pieces"

    def observe(self, taps: Taps, weight: float) -> DenseMoments:
        """Σ_examples v vᵀ."""
        M: Tensor | None = None
        rows = columns = 0
        for V in gradients_of_examples(taps):
            rows, columns = V.shape[1:]
            pieces = _pieces(rows, columns, self.limit)
            size = -(-rows // pieces) * columns
            v = _vectors(V, pieces, size)  # (pieces, examples, size)
            M = v.mT @ v if M is None else M.baddbmm_(v.mT, v)
        assert M is not None
        return DenseMoments(M.mul_(weight), rows, columns)
