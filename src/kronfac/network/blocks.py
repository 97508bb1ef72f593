"""Which curvature block a unit gets, by what kind of use it has and how large it is."""

from dataclasses import dataclass
from typing import Literal, get_args

from kronfac.curvature import Block, DenseBlock, DiagonalBlock, KroneckerBlock
from kronfac.curvature.kronecker import Sharing

Kind = Literal["matrix", "convolution", "grouped", "embedding", "elementwise", "mixed"]
PIECES = 32
"""Pieces of a dense block at the most: with more of them it takes more memory than ten gradients."""


@dataclass(frozen=True)
class Blocks:
    """How blocks are chosen.

    Args:
        sharing: how the factors of a weight that an example uses at several places are taken, see
            `KroneckerBlock`.
        dense_limit: parameters up to which a unit has a dense block: normalisation layers, depthwise and
            small convolutions, single parameters. Larger ones of these have several such pieces. Linear
            layers always have Kronecker factors.
        wide_limit: features up to which a Kronecker factor is a full matrix; above it is a diagonal.
    """

    sharing: Sharing = "expand"
    dense_limit: int = 512
    wide_limit: int = 4096

    def __post_init__(self) -> None:
        if self.sharing not in get_args(Sharing):
            raise ValueError(
                f"Blocks needs a sharing that is one of {get_args(Sharing)}; got {self.sharing!r}."
            )
        for name in ("dense_limit", "wide_limit"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"Blocks needs a {name} that is not negative; got {getattr(self, name)}."
                )

    def choose(self, kind: Kind, rows: int, columns: int) -> Block:
        """The block of a unit (rows, columns) that is used in this way."""
        size = rows * columns
        if kind == "matrix":
            return self._kronecker(rows, columns)
        if kind == "embedding" and size > self.dense_limit:
            # The second moments of unit vectors are diagonal.
            return KroneckerBlock(diagonal_grads=True, diagonal_inputs=columns > self.wide_limit)
        if kind == "convolution" and size > self.dense_limit:
            return self._kronecker(rows, columns)
        if size <= PIECES * self.dense_limit and columns <= self.dense_limit and kind != "mixed":
            return DenseBlock(self.dense_limit)
        if size <= self.dense_limit:
            return DenseBlock(self.dense_limit)
        return DiagonalBlock()

    def _kronecker(self, rows: int, columns: int) -> KroneckerBlock:
        return KroneckerBlock(
            self.sharing,
            diagonal_inputs=columns > self.wide_limit,
            diagonal_grads=rows > self.wide_limit,
        )
