"""Layer inputs and outputs of one forward pass, by hooks that only record."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kronfac.errors import UnsupportedModelError
from kronfac.layers import Layer


class Captured:
    """What each layer was called with and what it returned, in the order of the calls."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._seen: dict[int, tuple[Tensor, GradientEdge]] = {}
        self._returned: dict[str, tuple[Tensor, int]] = {}

    def record(self, index: int, x: Tensor, outputs: Tensor) -> None:
        """Remember the one call of layer `index`."""
        if index in self._seen:
            raise UnsupportedModelError(
                f"KFAC needs every layer to be used once in a forward pass; layer "
                f"{self._layers[index].name!r} was used twice. Weight sharing is not supported yet."
            )
        self._seen[index] = (x, get_gradient_edge(outputs))
        self._returned[self._layers[index].name] = (outputs.detach(), outputs._version)

    def inputs(self) -> list[Tensor]:
        """What each layer was called with, in the layers' order."""
        return [self._get(i)[0] for i in range(len(self._layers))]

    def outputs(self) -> list[GradientEdge]:
        """Where each layer returned s_i into the graph, in the layers' order.

        Edges, not tensors: an activation may overwrite s_i, after which the tensor stands for a_i.
        """
        return [self._get(i)[1] for i in range(len(self._layers))]

    def activations(self) -> dict[str, Tensor] | None:
        """What each layer returned, by its name; None if one was not called or was overwritten."""
        intact = all(s._version == version for s, version in self._returned.values())
        if not intact or len(self._returned) < len(self._layers):
            return None
        return {name: s for name, (s, _) in self._returned.items()}

    def _get(self, index: int) -> tuple[Tensor, GradientEdge]:
        if index not in self._seen:
            raise UnsupportedModelError(
                f"Layer {self._layers[index].name!r} has trainable parameters, but the model did not "
                "use it. Freeze it with requires_grad_(False) or remove it."
            )
        return self._seen[index]


@contextmanager
def capture(layers: Sequence[Layer]) -> Iterator[Captured]:
    """Record inputs and outputs of `layers` for one forward pass inside this context."""
    captured = Captured(layers)

    def recorder(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> None:
            captured.record(index, args[0].detach(), outputs)

        return hook

    handles = [layer.module.register_forward_hook(recorder(i)) for i, layer in enumerate(layers)]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()
