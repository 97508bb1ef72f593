"""Vectors in parameter space: one matrix V (rows, columns) per unit."""

from typing import Annotated

import torch
from torch import Tensor

from kronfac.storage import PER_UNIT

Matrices = Annotated[tuple[Tensor, ...], PER_UNIT]
"""Gradients, updates, directions, parameters."""


def dot(u: Matrices, v: Matrices) -> Tensor:
    """uᵀv, summed over the units in float64."""
    parts = [torch.dot(a.reshape(-1), b.reshape(-1)).double() for a, b in zip(u, v, strict=True)]
    return torch.stack(parts).sum()
