"""What K-FAC knows of layers: one file per kind, with its adapter and the torch functions that it calls."""

from kronfac.network.layers import (
    convolution,
    elementwise,
    embedding,
    hugging_face,
    linear,
    normalization,
    transposed_convolution,
)

__all__ = [
    "convolution",
    "elementwise",
    "embedding",
    "hugging_face",
    "linear",
    "normalization",
    "transposed_convolution",
]
