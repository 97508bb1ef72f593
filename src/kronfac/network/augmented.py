"""Inputs of a use with further columns beside them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.curvature import Inputs
from kronfac.curvature.scattered_rows import ScatteredRows
from kronfac.curvature.taps import Rows


@dataclass(frozen=True)
class Augmented:
    """Inputs with further columns that are the same at every place, such as the ones of a bias."""

    inputs: Inputs
    columns: list[Tensor]  # (examples, places, …) each

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""
        width = sum(x.shape[-1] for x in self.columns)
        return torch.Size((*self.inputs.shape[:2], self.inputs.shape[2] + width))

    def all(self) -> Tensor:
        """ā."""
        return torch.cat([self.inputs.all(), *self.columns], dim=-1)

    def rows(self) -> Rows:
        """As many vectors as the inputs have."""
        rows, columns = self.inputs.rows(), torch.cat([x[0, 0] for x in self.columns])
        if isinstance(rows, ScatteredRows):
            return rows.append(columns)
        assert isinstance(rows, Tensor)
        return torch.cat([rows, columns.expand(len(rows), -1)], dim=-1)

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example."""
        return torch.cat([self.inputs.gradients(g), *(g.mT @ x for x in self.columns)], dim=-1)

    def select(self, index: slice) -> "Augmented":
        """The inputs of some of the examples."""
        return Augmented(self.inputs.select(index), [x[index] for x in self.columns])
