"""What K-FAC knows of layers: one file per kind, with its adapter and the torch functions that it calls."""

from kronfac.model.layers import (
    attention,
    bilinear,
    convolution,
    elementwise,
    embedding,
    linear,
    normalization,
    recurrent,
)

__all__ = [
    "attention",
    "bilinear",
    "convolution",
    "elementwise",
    "embedding",
    "linear",
    "normalization",
    "recurrent",
]
