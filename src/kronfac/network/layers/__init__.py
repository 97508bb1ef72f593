"""What K-FAC knows of layers: one file per kind, with its adapter and the torch functions that it calls."""

from kronfac.network.layers import (
    attention,
    bilinear,
    convolution,
    elementwise,
    embedding,
    hugging_face,
    linear,
    normalization,
    recurrent,
    transposed_convolution,
)

__all__ = [
    "attention",
    "bilinear",
    "convolution",
    "elementwise",
    "embedding",
    "hugging_face",
    "linear",
    "normalization",
    "recurrent",
    "transposed_convolution",
]
