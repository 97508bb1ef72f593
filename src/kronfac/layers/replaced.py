"""Layers with other forward functions, for passes in which they do something else than usual."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from kronfac.layers.base import Layer


@contextmanager
def replaced(
    layers: Sequence[Layer], forwards: Sequence[Callable[[Tensor], Tensor]]
) -> Iterator[None]:
    """The layers' modules with other forward functions, while this context lasts."""
    try:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.module.forward = forward
        yield
    finally:
        for layer in layers:
            layer.module.__dict__.pop("forward", None)
