"""The uses of all units in one forward pass of K-FAC's own, by hooks that only record.

The hooks record what this thread calls; another thread that evaluates the model meanwhile is not seen, and
sees nothing.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kronfac.network.find import Site


class Uses:
    """What every unit was multiplied with, and where the results are in the graph."""

    def __init__(self, units: int) -> None:
        self._uses: list[list[tuple[Tensor, int]]] = [[] for _ in range(units)]
        self.edges: list[GradientEdge] = []
        """Where the outputs of the uses entered the graph. Edges, not tensors: an activation may overwrite
        the outputs, after which the tensor stands for something else."""
        self._arranged: list[tuple[torch.Size, Callable[[Tensor], Tensor]]] = []

    def record(self, site: Site, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        """Remember one call of a module."""
        for use in site.adapter.uses(site.module, args, kwargs, output):
            if not use.outputs.requires_grad:
                continue  # no gradient goes through it
            number = len(self.edges)
            self.edges.append(get_gradient_edge(use.outputs))
            self._arranged.append((use.outputs.shape, use.arranged))
            for unit, keys in site.columns:
                columns = [_columns(use.inputs[key], use.arranged(use.outputs)) for key in keys]
                joined = columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)
                self._uses[unit].append((joined, number))

    def of(self, unit: int) -> list[Tensor]:
        """ā of every use of a unit, (examples, places, columns)."""
        return [inputs for inputs, _ in self._uses[unit]]

    def grads(self, unit: int, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """g of every use of a unit, (examples, places, rows), from the gradients at all edges."""
        found = []
        for _, number in self._uses[unit]:
            shape, arrange = self._arranged[number]
            g = grads[number]
            if g is None:
                g = self._uses[unit][0][0].new_zeros(shape)
            found.append(_places(arrange(g)))
        return found


def _columns(inputs: Tensor | None, outputs: Tensor) -> Tensor:
    """(examples, places, columns)."""
    if inputs is not None:
        return _places(inputs.detach())
    examples, places, _ = _places(outputs).shape
    return outputs.new_ones(()).detach().expand(examples, places, 1)


def _places(x: Tensor) -> Tensor:
    """(examples, places, features) from (examples, …, features), or from the features of one example."""
    if x.dim() == 1:
        return x.view(1, 1, -1)
    return x.reshape(len(x), -1, x.shape[-1])


@contextmanager
def record_uses(sites: Sequence[Site], units: int) -> Iterator[Uses]:
    """Record the uses of a forward pass inside this context."""
    uses, thread = Uses(units), threading.get_ident()

    def recorder(site: Site) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                uses.record(site, args, kwargs, output)

        return hook

    # Before other hooks, which may return something else than the module did.
    handles = [
        s.module.register_forward_hook(recorder(s), with_kwargs=True, prepend=True) for s in sites
    ]
    try:
        yield uses
    finally:
        for handle in handles:
            handle.remove()
