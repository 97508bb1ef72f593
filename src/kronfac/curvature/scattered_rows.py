"""Vectors by their values in some columns: patches, of which many columns may be zero.

What a transposed convolution is multiplied with at a place is zero in all columns but those of the taps
that reach it. Vectors with the same such columns form a group, and Σ x xᵀ is one small product per group.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """Vectors that are zero outside of the same columns."""

    values: Tensor  # (some vectors, some columns)
    columns: Tensor  # the numbers of these columns
    vectors: Tensor  # the numbers of these vectors


@dataclass(frozen=True)
class ScatteredRows:
    """Vectors (count, size + constants); those of no group are zero, but for the constants."""

    groups: tuple[Group, ...]
    size: int
    count: int
    constants: Tensor  # (constants,): further columns, the same in all vectors

    @property
    def shape(self) -> torch.Size:
        """That of the vectors."""
        return torch.Size((self.count, self.size + len(self.constants)))

    def __len__(self) -> int:
        return self.count

    def append(self, constants: Tensor) -> "ScatteredRows":
        """The vectors with further columns that are the same in all of them."""
        return replace(self, constants=torch.cat([self.constants, constants]))

    def select(self, keep: Tensor) -> "ScatteredRows":
        """Some of the vectors, by a bool for every one."""
        number = keep.cumsum(0) - 1
        groups = []
        for group in self.groups:
            kept = keep[group.vectors]
            vectors = number[group.vectors[kept]]
            groups.append(replace(group, values=group.values[kept], vectors=vectors))
        return replace(self, groups=tuple(groups), count=int(keep.sum()))

    def all(self) -> Tensor:
        """The vectors, (count, size + constants)."""
        rows = self.constants.new_zeros(self.shape)
        for group in self.groups:
            rows[group.vectors.unsqueeze(1), group.columns] = group.values
        rows[:, self.size :] = self.constants
        return rows

    def second_moment(self) -> Tensor:
        """Σ x xᵀ over the vectors."""
        _, width = self.shape
        total, sums = self.constants.new_zeros(width, width), self.constants.new_zeros(self.size)
        for group in self.groups:
            # No group has a column twice, which += would count once.
            at = group.columns.unsqueeze(1), group.columns
            total[at] += group.values.mT @ group.values
            sums[group.columns] += group.values.sum(dim=0)
        beside = torch.outer(sums, self.constants)
        total[: self.size, self.size :], total[self.size :, : self.size] = beside, beside.mT
        total[self.size :, self.size :] = self.count * torch.outer(self.constants, self.constants)
        return total

    def squares(self) -> Tensor:
        """Σ over the vectors of their squares, (size + constants,)."""
        total = self.constants.new_zeros(self.shape[1])
        for group in self.groups:
            total[group.columns] += torch.einsum("ni,ni->i", group.values, group.values)
        total[self.size :] = self.count * self.constants.square()
        return total
