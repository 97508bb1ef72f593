"""Whether the layers of a model form a chain, each fed by the one before alone [MG15 §4.3]."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kronfac.errors import UnsupportedModelError
from kronfac.layers import Layer
from kronfac.minibatch import Call


def chain_order(model: nn.Module, layers: Sequence[Layer], call: Call) -> list[Layer]:
    """The layers in the order of the chain.

    Every layer's output is replaced by a leaf of the autograd graph in a forward pass over two rows;
    in a chain the input of a layer then depends on the leaf of the layer before and on no other, and
    the model's output on the last.

    Raises:
        UnsupportedModelError: the model is not a chain.
    """
    order: list[Layer] = []
    sources: list[Tensor] = []  # the model's own inputs
    leaves: list[Tensor] = []  # each layer's output

    def source(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        sources.append(value.detach().clone().requires_grad_())
        return sources[-1]

    def cut(layer: Layer) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], outputs: Tensor) -> Tensor:
            if layer in order:
                raise UnsupportedModelError(
                    f"BlockTridiagonalInverse needs every layer to be used once; {layer.name!r} was "
                    "used twice."
                )
            if order:
                _check_link(args[0], sources + leaves, layer.name, order[-1].name)
            order.append(layer)
            leaf = outputs.detach().requires_grad_()
            leaves.append(leaf)
            return leaf.clone()  # what an in-place activation may overwrite

        return hook

    handles = [layer.module.register_forward_hook(cut(layer)) for layer in layers]
    try:
        with torch.enable_grad():
            rows = call.first(2)
            rows = replace(
                rows,
                args=pytree.tree_map(source, rows.args),
                kwargs=pytree.tree_map(source, rows.kwargs),
            )
            outputs = rows.run(model)
    finally:
        for handle in handles:
            handle.remove()
    if len(order) != len(layers):
        unused = next(layer.name for layer in layers if layer not in order)
        raise UnsupportedModelError(
            f"BlockTridiagonalInverse needs every layer to be used; {unused!r} was not."
        )
    _check_link(outputs, sources + leaves, "the model's output", order[-1].name)
    return order


def _check_link(x: Tensor, leaves: list[Tensor], name: str, previous: str) -> None:
    """Refuse an x that was computed from other leaves than the last."""
    if _leaves_of(x) & {id(leaf) for leaf in leaves} != {id(leaves[-1])}:
        raise UnsupportedModelError(
            f"BlockTridiagonalInverse needs a chain of layers, each fed by the one before alone; "
            f"{name!r} does not depend on {previous!r} alone. Use BlockDiagonalInverse."
        )


def _leaves_of(x: Tensor) -> set[int]:
    """Identities of the leaf tensors that x was computed from."""
    if x.grad_fn is None:
        return {id(x)}
    found: set[int] = set()
    visited: set[Any] = set()
    stack: list[Any] = [x.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        stack.extend(parent for parent, _ in node.next_functions)
    return found
