"""The parameters that one curvature block describes, as one matrix V (rows, columns).

For a layer s = W a + b that is V = [W b], (out, in+1), so that s = V ā with ā = (a, 1) [MG15 §2.1]. A
vector in parameter space is a tuple with one such matrix per unit: gradients, updates, directions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from kronfac.curvature import Block


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

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        rows = self.rows
        return rows, sum(p.numel() for p in self.parameters) // rows

    @cached_property
    def rows(self) -> int:
        """The length of the first parameter."""
        first = self.parameters[0]
        return len(first) if first.dim() else 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.parameters[0].dtype

    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        """V from tensors shaped like the parameters."""
        rows = self.rows
        columns = [t.reshape(rows, -1) for t in tensors]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def split(self, V: Tensor) -> list[Tensor]:
        """Tensors shaped like the parameters from V, views of it."""
        parts = []
        for p, start, stop in self._columns:
            if p.dim() == 1:
                parts.append(V[:, start])
            else:
                part = V[:, start:stop]
                parts.append(part if p.dim() == 2 else part.view(p.shape))
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
