"""A dense matrix over the weights of some layers, in blocks by pairs of layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockMatrix:
    """Rows and columns are the weights of the layers `names`, layer after layer.

    Within a layer they go through W = [W b] column by column, as vec does: the weights that leave one
    unit are together, and the biases come last.
    """

    dense: Tensor  # (weights, weights)
    names: tuple[str, ...]
    """Names of the layers."""
    sizes: tuple[int, ...]
    """Weights of each layer, biases included."""

    @property
    def layers(self) -> int:
        """ℓ, the number of layers and of blocks in a row."""
        return len(self.sizes)

    @property
    def edges(self) -> tuple[int, ...]:
        """Where blocks begin and end: 0, …, the number of weights."""
        return (0, *accumulate(self.sizes))

    def block(self, i: int, j: int) -> Tensor:
        """The block of layers i and j, counted from 0: a view."""
        edges = self.edges
        return self.dense[edges[i] : edges[i + 1], edges[j] : edges[j + 1]]

    def block_sums(self) -> Tensor:
        """Σ |entries| of every block, (ℓ, ℓ)."""
        count = range(self.layers)
        return torch.stack(
            [torch.stack([self.block(i, j).abs().sum() for j in count]) for i in count]
        )

    def block_means(self) -> Tensor:
        """The average of |entries| of every block, (ℓ, ℓ): the right of the paper's figure 3."""
        sizes = torch.tensor(self.sizes, dtype=self.dense.dtype, device=self.dense.device)
        return self.block_sums() / torch.outer(sizes, sizes)

    def mass_beyond(self, distance: int) -> float:
        """The share of Σ |entries| in blocks of layers further apart than `distance`.

        0 gives what is off the block diagonal, 1 what is off the block tridiagonal.
        """
        sums = self.block_sums()
        index = torch.arange(self.layers, device=sums.device)
        far = (index[:, None] - index[None, :]).abs() > distance
        return float(sums[far].sum() / sums.sum())

    def __sub__(self, other: "BlockMatrix") -> "BlockMatrix":
        if self.sizes != other.sizes:
            raise ValueError(
                f"Only matrices over the same layers can be subtracted; got blocks of {self.sizes} "
                f"and {other.sizes}."
            )
        return BlockMatrix(self.dense - other.dense, self.names, self.sizes)


def filled(
    names: Sequence[str],
    sizes: Sequence[int],
    block: Callable[[int, int], Tensor | None],
    like: Tensor,
) -> BlockMatrix:
    """The matrix with these blocks, None for one of zeros; made one at a time, to save memory."""
    dense = like.new_zeros(sum(sizes), sum(sizes))
    matrix = BlockMatrix(dense, tuple(names), tuple(sizes))
    for i in range(matrix.layers):
        for j in range(matrix.layers):
            value = block(i, j)
            if value is not None:
                matrix.block(i, j).copy_(value)
    return matrix


@dataclass(frozen=True)
class Comparison:
    """The distance of an approximation N from M."""

    absolute: float
    """Σ |M − N| over all pairs of weights."""
    relative_absolute: float
    """Σ |M − N| / Σ |M|."""
    relative_frobenius: float
    """‖M − N‖_F / ‖M‖_F."""


def compare(reference: BlockMatrix, approximation: BlockMatrix) -> Comparison:
    """The distance of `approximation` from `reference`."""
    difference = (reference - approximation).dense
    absolute = float(difference.abs().sum())
    return Comparison(
        absolute=absolute,
        relative_absolute=absolute / float(reference.dense.abs().sum()),
        relative_frobenius=float(difference.norm() / reference.dense.norm()),
    )
