"""The parameters that one curvature block describes, as one matrix V (rows, columns).

For a layer s = W a + b that is V = [W b], (out, in+1), so that s = V ā with ā = (a, 1) [MG15 §2.1]. A
vector in parameter space is a tuple with one such matrix per unit: gradients, updates, directions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kronfac.curvature import Block, DiagonalBlock
from kronfac.errors import UnsupportedModelError
from kronfac.model.blocks import Kind


class MatrixLayout(NamedTuple):
    """How a parameter is read as matrices, (matrices, rows, columns), each multiplied with vectors a."""

    transposed: int = 0
    """1 if it is stored as (in, out / groups, …), and not as (out, in / groups, …)."""
    groups: int = 1
    """Groups of rows with inputs of their own, as in grouped convolutions."""
    parts: int = 1
    """Packed matrices with the same inputs, such as queries, keys and values, or the gates of an LSTM."""

    def split(self, t: Tensor) -> Tensor:
        """Return (matrices, rows, columns) from a tensor in the parameter's shape."""
        if self.transposed:
            t = t.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return t.reshape(self.groups * self.parts, len(t) // (self.groups * self.parts), -1)

    def join(self, X: Tensor, shape: torch.Size) -> Tensor:
        """Return a tensor in the parameter's shape from (matrices, rows, columns)."""
        if not self.transposed:
            return X.reshape(shape)
        apart = X.reshape(self.groups, shape[1], shape[0] // self.groups, *shape[2:])
        return apart.transpose(1, 2).flatten(0, 1)

    def size(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return the numbers of matrices, rows and columns for a parameter of this shape."""
        rows = self.groups * shape[1] if self.transposed else shape[0]
        return self.groups * self.parts, rows // (self.groups * self.parts), shape.numel() // rows


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters with one curvature block, side by side as the columns of one matrix."""

    name: str
    """The layer's path in the model, or the parameter's; used in errors and in saved states."""
    names: tuple[str, ...]
    """Full names of the parameters."""
    parameters: tuple[nn.Parameter, ...]
    block: Block
    """How its curvature is approximated."""
    swapped: int = 0
    """For weights that are stored as (in, out / groups, …), the number of groups; 0 for (out, in, …)."""
    observed: bool = True
    """Whether its uses are seen; else only its gradient is."""
    chosen: bool = True
    """Whether its block was chosen by an adapter; else by what the first pass shows of its uses."""
    kind: Kind | Literal[""] = ""
    """The kind of use that its block was chosen for in the first pass; none if that of its adapter fits."""
    why: str = ""
    """Why it has no better block, for the plan."""
    original: "Unit | None" = None
    """What it was before the first pass, if that has shown that another block fits."""

    @property
    def undiscovered(self) -> "Unit":
        """What it was before the first pass."""
        return self if self.original is None else self.original

    def unobserved(self, why: str) -> "Unit":
        """The unit with a diagonal block, which is estimated from the gradient alone."""
        block, original = DiagonalBlock(), self.undiscovered
        return replace(self, block=block, observed=False, why=why, original=original)

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows, sum(p.numel() for p in self.parameters) // self.rows

    @cached_property
    def rows(self) -> int:
        """The length of the first parameter; of one that nothing is known of, without dimensions of 1."""
        first = self.parameters[0]
        if self.swapped and first.dim() > 1:  # not a bias whose weight is frozen or shared
            return self.swapped * first.shape[1]
        if not self.chosen:
            return next((size for size in first.shape if size > 1), 1)
        return len(first) if first.dim() else 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.parameters[0].dtype

    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        """V from tensors shaped like the parameters."""
        columns = [self._matrix(t) for t in tensors]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def join_examples(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """(examples, rows, columns) from (examples, …) shaped like the parameters; None for zeros."""
        known = next(t for t in tensors if t is not None)
        columns = [
            known.new_zeros(len(known), self.rows, p.numel() // self.rows)
            if t is None
            else t.reshape(len(t), self.rows, -1)
            for t, p in zip(tensors, self.parameters, strict=True)
        ]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)

    def _matrix(self, t: Tensor) -> Tensor:
        """(rows, …) from a tensor shaped like one of the parameters."""
        if self.swapped and t.dim() > 1:
            t = MatrixLayout(1, self.swapped).split(t)
        return t.reshape(self.rows, -1)

    def split(self, V: Tensor) -> list[Tensor]:
        """Tensors shaped like the parameters from V: views of it, unless weights are swapped in groups."""
        parts = []
        for p, start, stop in self._columns:
            if p.dim() == 1 and stop - start == 1:
                parts.append(V[:, start])
            elif self.swapped and p.dim() > 1:
                parts.append(MatrixLayout(1, self.swapped).join(V[:, start:stop], p.shape))
            else:
                part = V[:, start:stop]
                parts.append(part if part.shape == p.shape else part.reshape(p.shape))
        return parts

    @cached_property
    def _columns(self) -> list[tuple[nn.Parameter, int, int]]:
        """Every parameter with its first column and one past its last."""
        found, start = [], 0
        for p in self.parameters:
            stop = start + p.numel() // self.rows
            found.append((p, start, stop))
            start = stop
        return found

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, shape={self.shape}, block={type(self.block).__name__})"


def parameters_of(units: Sequence[Unit]) -> list[nn.Parameter]:
    """All parameters, in the order of the units."""
    return [p for unit in units for p in unit.parameters]


def refuse_dtypes(units: Sequence[Unit]) -> None:
    """Refuse parameters that are not in float32 or float64.

    Raises:
        UnsupportedModelError: there are some.
    """
    others = [
        u for u in units if any(p.dtype not in (torch.float32, torch.float64) for p in u.parameters)
    ]
    if others:
        named = ", ".join(f"{u.name!r} ({u.dtype})" for u in others)
        raise UnsupportedModelError(
            f"KFAC needs real parameters in float32 or float64; got {named}. Keep the model in float32, "
            "and for half precision call it inside torch.autocast."
        )
