"""Whether the layers of a model form a chain, each fed by the one before alone [MG15 §4.3].

Read off the autograd graph of one forward pass, which is left as it is: from the input of a layer the graph
is followed back to the outputs of other layers, and to the model's own inputs.
"""

import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from kronfac.errors import UnsupportedModelError
from kronfac.network.find import Site
from kronfac.network.network import Network
from kronfac.network.program import ModelCall, Operation, Pass

INPUT = -1
"""Stands for the model's own inputs among the layers that something depends on."""


def chain_network(network: Network, part: Pass) -> Network:
    """The network with its layers in the order of the chain, other units behind them, and links between.

    Raises:
        UnsupportedModelError: the layers are not a chain.
    """
    sites = [site for site in network.sites if site.columns]
    order = _order(network, sites, part)
    numbers = [number for site in order for number, _ in site.columns]
    rest = [n for n in range(len(network.units)) if n not in numbers]
    links = [n + 1 < len(numbers) for n in range(len(network.units) - 1)]
    return network.reordered([*numbers, *rest], links)


def _order(network: Network, sites: list[Site], part: Pass) -> list[Site]:
    order: list[Site] = []
    producers: dict[Any, int] = {}  # the graph's nodes that are outputs of layers, or inputs
    thread = threading.get_ident()

    def source(value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        leaf = value.detach().clone().requires_grad_()
        with torch.enable_grad():
            return leaf.view_as(leaf)  # a node to recognise it by

    def hook(site: Site) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
            if threading.get_ident() != thread:
                return
            if any(site is seen for seen in order):
                raise UnsupportedModelError(
                    f"BlockTridiagonalInverse needs every layer to be used once; {site.name!r} was "
                    "used twice. Use BlockDiagonalInverse."
                )
            (use,) = site.adapter.uses(module, args, kwargs, output)
            inputs = [x for x in use.inputs.values() if x is not None]
            if any(x.dim() > 2 for x in inputs):
                raise UnsupportedModelError(
                    "BlockTridiagonalInverse needs layers that use their weights once in an example; "
                    f"the inputs of {site.name!r} have shape {tuple(inputs[0].shape)}. Use "
                    "BlockDiagonalInverse."
                )
            if order:
                _check(inputs, producers, len(order) - 1, repr(site.name), order[-1].name)
            order.append(site)
            producers[use.outputs.grad_fn] = len(order) - 1

        return record

    def with_sources(step: ModelCall | Operation) -> ModelCall | Operation:
        if not isinstance(step, ModelCall):
            return step
        args, kwargs = pytree.tree_map(source, (step.args, step.kwargs))
        return replace(step, args=args, kwargs=kwargs)

    with ExitStack() as stack, torch.enable_grad():
        for site in sites:
            handle = site.module.register_forward_hook(hook(site), with_kwargs=True, prepend=True)
            stack.callback(handle.remove)
        traced = replace(part, steps=tuple(map(with_sources, part.steps)))
        _name_sources(traced, producers)
        outputs = traced.run(network.model)
    unused = [site.name for site in sites if not any(site is seen for seen in order)]
    if unused:
        raise UnsupportedModelError(
            f"BlockTridiagonalInverse needs every layer to be used; {unused[0]!r} was not."
        )
    _check(outputs, producers, len(order) - 1, "the model's output", order[-1].name)
    return order


def _name_sources(part: Pass, producers: dict[Any, int]) -> None:
    for call in part.calls:
        for leaf in pytree.tree_leaves((call.args, call.kwargs)):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                producers[leaf.grad_fn] = INPUT


def _check(
    tensors: Iterable[Tensor], producers: dict[Any, int], last: int, name: str, previous: str
) -> None:
    """Refuse tensors that were computed from anything but the output of the last layer."""
    found: set[int] = set()
    for tensor in tensors:
        found |= _ancestors(tensor, producers)
    if found != {last}:
        raise UnsupportedModelError(
            "BlockTridiagonalInverse needs a chain of layers, each fed by the one before alone; "
            f"{name} does not depend on {previous!r} alone. Use BlockDiagonalInverse."
        )


def _ancestors(tensor: Tensor, producers: dict[Any, int]) -> set[int]:
    """The nearest of the producers that a tensor was computed from."""
    found: set[int] = set()
    visited: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if node in producers:
            found.add(producers[node])
        else:
            stack.extend(parent for parent, _ in node.next_functions)
    return found
