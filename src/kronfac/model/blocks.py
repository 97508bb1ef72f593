"""Which curvature block a unit gets, by what kind of use it has and how large it is."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

from kronfac.curvature import (
    Block,
    DenseBlock,
    DiagonalBlock,
    GroupedKroneckerBlock,
    KroneckerBlock,
    KroneckerSumBlock,
)
from kronfac.curvature.kronecker import Sharing

Kind = Literal[
    "matrix",
    "convolution",
    "grouped",
    "embedding",
    "tied",
    "tied embedding",
    "elementwise",
    "mixed",
]
"""How a unit V is used. Tied: V in one place, Vᵀ in another, which for a tied embedding is a lookup.
Mixed: in ways that have no block in common but a dense one."""
PIECES = 32
"""Pieces of a dense block at the most: with more of them it takes more memory than ten gradients."""
FEW_COLUMNS = 64
"""Columns up to which a grouped convolution has dense pieces: depthwise ones have those of their kernel."""


@dataclass(frozen=True)
class Blocks:
    """How blocks are chosen.

    Args:
        sharing: how to estimate the factors of a weight that each example uses at several places, see
            `KroneckerBlock`.
        dense_limit: parameters up to which a unit has a dense block: normalisation layers, depthwise and
            small convolutions, small tied weights, single parameters. Larger normalisation layers,
            depthwise convolutions and single parameters have several such pieces; others have Kronecker
            factors, as Linear layers always have.
        wide_limit: features up to which a Kronecker factor is a full matrix; above it is a diagonal. Over
            the vocabulary of an embedding it always is, tied to a head or not.
        unsupported: what happens to parameters of layers that KFAC does not know: `"diagonal"` gives them
            the block that fits how the first mini-batch uses them, a diagonal one if that is not seen;
            `"refuse"` raises an error that names them.
    """

    sharing: Sharing = "expand"
    dense_limit: int = 512
    wide_limit: int = 4096
    unsupported: Literal["diagonal", "refuse"] = "diagonal"

    def __post_init__(self) -> None:
        if self.sharing not in get_args(Sharing):
            raise ValueError(
                f"Blocks needs a sharing that is one of {get_args(Sharing)}; got {self.sharing!r}."
            )
        if self.unsupported not in ("diagonal", "refuse"):
            raise ValueError(
                f"Blocks needs unsupported to be 'diagonal' or 'refuse'; got {self.unsupported!r}."
            )
        for name in ("dense_limit", "wide_limit"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"Blocks needs a {name} that is not negative; got {getattr(self, name)}."
                )

    def choose(self, kind: Kind, rows: int, columns: int) -> Block:
        """The block of a unit (rows, columns) that is used in this way."""
        if rows * columns > self.dense_limit or kind == "matrix":
            if kind in ("matrix", "convolution"):
                return self._kronecker(rows, columns)
            if kind == "embedding":
                # The second moments of unit vectors are diagonal.
                return KroneckerBlock(
                    diagonal_grads=True, diagonal_inputs=columns > self.wide_limit
                )
            if kind in ("tied", "tied embedding"):
                return self._sum(rows, columns, lookups=kind == "tied embedding")
            if kind == "grouped" and columns > FEW_COLUMNS:
                return GroupedKroneckerBlock()
            if kind == "mixed":
                return DiagonalBlock()
        return self._dense(rows, columns)

    def _dense(self, rows: int, columns: int) -> Block:
        if rows * columns <= PIECES * self.dense_limit and columns <= self.dense_limit:
            return DenseBlock(self.dense_limit)
        return DiagonalBlock()

    def _sum(self, rows: int, columns: int, lookups: bool) -> KroneckerSumBlock:
        direct = self._kronecker(rows, columns)
        if not lookups:
            return KroneckerSumBlock(direct, direct)
        # For a vocabulary a diagonal G is as good as a full one (docs/results/negative_results.md), and
        # the rows fall apart: no decomposition of a matrix as large as the vocabulary.
        by_row = replace(direct, diagonal_grads=True)
        return KroneckerSumBlock(by_row, replace(by_row, sharing="expand"))

    def _kronecker(self, rows: int, columns: int) -> KroneckerBlock:
        return KroneckerBlock(
            self.sharing,
            diagonal_inputs=columns > self.wide_limit,
            diagonal_grads=rows > self.wide_limit,
        )
