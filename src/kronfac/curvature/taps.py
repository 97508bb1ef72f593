"""Taps: the inputs and gradients of one use of a unit's matrix V (rows, columns) in one backward pass.

- `Tap`: s = V ā at every place, with g the gradient at s. The gradient of example n is Σ_places g āᵀ.
  Layouts: ā (examples, places, columns), g (examples, places, rows). A transposed use is s = Vᵀ ā, with ā
  (examples, places, rows) and g (examples, places, columns).
- `GroupedTap`: rows in groups, each with inputs of its own, as in grouped convolutions.
- `ElementwiseTap`: only the gradient of every example, for parameters that multiply numbers one by one.
- `SummedGradient`: only the gradient summed over the examples, for parameters whose uses are not recorded.

Nothing here knows modules.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

WORK_SPACE = 2**24
"""The most numbers that gradients of single examples take at a time: 64 MB in float32."""


@runtime_checkable
class Inputs(Protocol):
    """Inputs ā that are computed when they are needed, such as the patches of an image."""

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""

    def all(self) -> Tensor:
        """ā, (examples, places, columns)."""

    def rows(self) -> "Rows":
        """Vectors (vectors, columns) whose mean second moment is A, or an estimate of it."""

    def select(self, index: slice) -> "Inputs":
        """The inputs of some of the examples."""

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example, (examples, rows, columns), for g (examples, places, rows)."""


@dataclass(frozen=True)
class OneHot:
    """Unit vectors e_i, given by their indices i and perhaps scaled: the inputs of an embedding."""

    indices: Tensor  # (examples, places), or (vectors,)
    size: int
    dtype: torch.dtype
    scale: Tensor | None = None
    """The factors, in the shape of the indices; None for 1."""

    @property
    def shape(self) -> torch.Size:
        """The shape of the vectors."""
        return torch.Size((*self.indices.shape, self.size))

    def __len__(self) -> int:
        return len(self.indices)

    def all(self) -> Tensor:
        """The vectors, (…, size)."""
        hot = torch.nn.functional.one_hot(self.indices, self.size).to(self.dtype)
        return hot if self.scale is None else hot * self.scale.unsqueeze(-1)

    def rows(self) -> "OneHot":
        """All of them, (vectors, size)."""
        scale = None if self.scale is None else self.scale.flatten()
        return replace(self, indices=self.indices.flatten(), scale=scale)

    def select(self, index: slice | Tensor) -> "OneHot":
        """The vectors of some of the examples."""
        scale = None if self.scale is None else self.scale[index]
        return replace(self, indices=self.indices[index], scale=scale)

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g e_iᵀ of every example, (examples, features, size)."""
        return g.mT @ self.all()

    def squares(self) -> Tensor:
        """Σ over the vectors of their squares, (size,)."""
        indices = self.indices.flatten()
        ones = indices.new_ones((), dtype=self.dtype).expand(indices.shape)
        squares = ones if self.scale is None else self.scale.flatten().square()
        return indices.new_zeros(self.size, dtype=self.dtype).index_add_(0, indices, squares)

    def outer(self, vectors: Tensor) -> Tensor:
        """Σ e_i vᵀ over all of them, (size, features), for vectors of the indices' shape."""
        flat = vectors.reshape(-1, vectors.shape[-1])
        if self.scale is not None:
            flat = flat * self.scale.reshape(-1, 1)
        total = flat.new_zeros(self.size, flat.shape[1])
        return total.index_add_(0, self.indices.flatten(), flat)


Rows = Tensor | OneHot


@dataclass(frozen=True)
class Tap:
    """Inputs and output gradients of one use of a unit."""

    inputs: Tensor | Inputs  # ā (examples, places, columns); rows if transposed
    grads: Tensor  # g (examples, places, rows); columns if transposed
    counts: Tensor | None = None
    """Which places count (padding does not), (examples, places), bool; None for all."""
    transposed: bool = False
    """Whether Vᵀ was multiplied, not V."""

    @property
    def examples(self) -> int:
        """The number of examples; 1 if their gradients are summed."""
        return len(self.grads)

    def dense_inputs(self) -> Tensor:
        """ā, (examples, places, features)."""
        if isinstance(self.inputs, Tensor):
            return self.inputs
        return self.inputs.all()

    def input_rows(self) -> Rows:
        """Vectors (vectors, features) whose mean second moment A is."""
        rows = self.inputs.flatten(0, 1) if isinstance(self.inputs, Tensor) else self.inputs.rows()
        if self.counts is None or len(rows) != self.counts.numel():
            return rows
        counts = self.counts.flatten()
        return rows[counts] if isinstance(rows, Tensor) else rows.select(counts)

    def grad_rows(self) -> Tensor:
        """g of all places, (vectors, features)."""
        g = self.grads.flatten(0, 1)
        return g if self.counts is None else g[self.counts.flatten()]

    def input_sums(self) -> Tensor:
        """Σ_places ā, (examples, features)."""
        inputs = self.dense_inputs()
        return (inputs if self.counts is None else inputs * self.counts.unsqueeze(-1)).sum(dim=1)

    def places(self) -> Tensor | int:
        """The number of places that count: one for all examples, or (examples, 1)."""
        if self.counts is None:
            return self.grads.shape[1]
        return self.counts.sum(dim=1, keepdim=True).clamp(min=1)

    def select(self, index: slice) -> "Tap":
        """The tap of some of the examples."""
        inputs = self.inputs
        return replace(
            self,
            inputs=inputs[index] if isinstance(inputs, Tensor) else inputs.select(index),
            grads=self.grads[index],
            counts=None if self.counts is None else self.counts[index],
        )

    def gradients(self) -> Tensor:
        """Σ_places g āᵀ of every example, (examples, rows, columns)."""
        if isinstance(self.inputs, Tensor):
            product = self.grads.mT @ self.inputs
        else:
            product = self.inputs.gradients(self.grads)
        return product.mT if self.transposed else product

    def squares(self) -> Tensor:
        """Σ_examples (g āᵀ)², (rows, columns), for a use with one place, without gradients of examples."""
        g, a = self.grads[:, 0].square(), self.dense_inputs()[:, 0].square()
        return a.mT @ g if self.transposed else g.mT @ a

    def total(self) -> Tensor:
        """The gradient, Σ over examples and places of g āᵀ, (rows, columns)."""
        if isinstance(self.inputs, OneHot):
            product = self.inputs.outer(self.grads).mT
        else:
            product = self.grads.flatten(0, 1).mT @ self.dense_inputs().flatten(0, 1)
        return product.mT if self.transposed else product

    def magnitude(self) -> float:
        """Σ ‖g‖ ‖ā‖, the total size of the summands of `total`."""
        if isinstance(self.inputs, OneHot):
            return float(self.grads.norm(dim=-1).sum(dtype=torch.float64))
        norms = self.grads.norm(dim=-1) * self.dense_inputs().norm(dim=-1)
        return float(norms.sum(dtype=torch.float64))


@dataclass(frozen=True)
class GroupedTap:
    """A use in which every group of rows has its own inputs."""

    inputs: Tensor  # ā (groups, examples, places, columns)
    grads: Tensor  # g (groups, examples, places, rows / groups)

    @property
    def examples(self) -> int:
        """The number of examples."""
        return self.grads.shape[1]

    def select(self, index: slice) -> "GroupedTap":
        """The tap of some of the examples."""
        return GroupedTap(self.inputs[:, index], self.grads[:, index])

    def gradients(self) -> Tensor:
        """The gradient of every example, (examples, rows, columns)."""
        return (self.grads.mT @ self.inputs).movedim(0, 1).flatten(1, 2)

    def total(self) -> Tensor:
        """The gradient, (rows, columns)."""
        return (self.grads.flatten(1, 2).mT @ self.inputs.flatten(1, 2)).flatten(0, 1)

    def magnitude(self) -> float:
        """The total size of the summands of `total`."""
        norms = self.grads.norm(dim=-1) * self.inputs.norm(dim=-1)
        return float(norms.sum(dtype=torch.float64))


@dataclass(frozen=True)
class ElementwiseTap:
    """The gradient of every example, without inputs and output gradients."""

    values: Tensor  # (examples, rows, columns)

    @property
    def examples(self) -> int:
        """The number of examples; 1 if their gradients are summed."""
        return len(self.values)

    def select(self, index: slice) -> "ElementwiseTap":
        """The tap of some of the examples."""
        return ElementwiseTap(self.values[index])

    def gradients(self) -> Tensor:
        """The gradient of every example, (examples, rows, columns)."""
        return self.values

    def total(self) -> Tensor:
        """The gradient, (rows, columns)."""
        return self.values.sum(dim=0)

    def magnitude(self) -> float:
        """The total size of the summands of `total`."""
        return float(self.values.flatten(1).norm(dim=1).sum(dtype=torch.float64))


@dataclass(frozen=True)
class SummedGradient:
    """The gradient summed over the examples, for a unit whose uses are not recorded."""

    V: Tensor  # (rows, columns)


AnyTap = Tap | GroupedTap | ElementwiseTap
Taps = Sequence[AnyTap] | SummedGradient
"""The uses of one unit in one pass, or only the sum of their gradients."""


def gradients_of_examples(taps: Taps) -> Iterator[Tensor]:
    """The gradients of single examples, (some, rows, columns), a part of the examples at a time.

    The gradients of all uses by an example are added. If the uses have different numbers of examples, it is
    unknown which belong together, and each use counts as further examples.
    """
    if isinstance(taps, SummedGradient):
        yield taps.V.unsqueeze(0)
        return
    together = len({tap.examples for tap in taps}) == 1
    for group in [taps] if together else [[tap] for tap in taps]:
        size = group[0].select(slice(0, 1)).gradients().numel()
        step = max(WORK_SPACE // max(size, 1), 1)
        for start in range(0, group[0].examples, step):
            total = sum(tap.select(slice(start, start + step)).gradients() for tap in group)
            assert isinstance(total, Tensor)
            yield total
