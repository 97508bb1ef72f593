"""What the first pass shows of a network: blocks of parameters that no adapter describes, and chains.

A parameter that is used by functions that K-FAC understands gets the block for uses of that kind. One that
is used in another way gets a diagonal block, from its gradient alone. So does one whose layer uses it in
another way than its adapter says, unless it is small.

In a chain, each layer is fed by the one before alone, which feeds nothing else [MG15 §4.3]. That is read
off the autograd graph of the pass: from the input of a layer the graph is followed back to the outputs of
other layers, and to the model's own inputs. A network may have several chains; at branches, and at layers
that use their weights at several places, they end.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kronfac.curvature import (
    AnyTap,
    Block,
    DiagonalBlock,
    GroupedKroneckerBlock,
    GroupedTap,
    KroneckerBlock,
    KroneckerSumBlock,
    OneHot,
    Tap,
)
from kronfac.model.blocks import Kind
from kronfac.model.functions import SeeFunctions, record_uses
from kronfac.model.network import Network
from kronfac.model.unit import Unit
from kronfac.model.uses import Uses
from kronfac.record.batch import ModelCall, Operation, Pass
from kronfac.warn import warn


def discover(network: Network, part: Pass) -> Network:
    """The network with a block for every unit that fits how it is used in this pass."""
    if network.discovered:
        return network
    _, seen = _run(network, part)
    units = [
        _unit(network, n, unit, seen) if unit.observed else unit
        for n, unit in enumerate(network.units)
    ]
    for old, new in zip(network.units, units, strict=True):
        if old.chosen and old.observed and not new.observed:
            names = ", ".join(map(repr, new.names))
            warn(
                f"KFAC does not see all uses of {names} as products with it: {new.why}. It gets a diagonal "
                "curvature block. Call the module instead of using its weight, or tell kronfac.register "
                "how the parameters are used.",
            )
    return replace(network, units=units, discovered=True)


def _run(
    network: Network, part: Pass, keep_sources: bool = False
) -> tuple[list[Tensor], SeeFunctions]:
    """The outputs of a pass, with their graph, and the uses in it."""
    uses = record_uses(
        network.sites, network.units, part.examples, dims=part.dims, keep_sources=keep_sources
    )
    with torch.enable_grad(), uses as seen:
        return part.run(network.model), seen


def _unit(network: Network, number: int, unit: Unit, seen: SeeFunctions) -> Unit:
    if reasons := [seen.unseen[id(p)] for p in unit.parameters if id(p) in seen.unseen]:
        computed = any("parametrizations." in name for name in unit.names)
        by = "the layer's weight is computed from it by a parametrization"
        return unit.unobserved(by if computed else reasons[0])
    if not seen.uses.of[number]:
        # One with an adapter may be used by other examples.
        return unit if unit.chosen else unit.unobserved("no use of it is seen")
    zeros: list[torch.Tensor | None] = [None] * len(seen.uses.edges)
    taps = seen.uses.taps(number, zeros)
    if unit.chosen and _fits(unit.block, taps):
        return unit
    kind = _kind(taps)
    # Whatever the uses are, a dense block takes their gradients.
    block = network.blocks.choose(kind, *unit.shape)
    if not _fits(block, taps) or (kind == "mixed" and isinstance(block, DiagonalBlock)):
        return unit.unobserved("used in several ways that have no block in common")
    return replace(unit, block=block, kind=kind, original=unit.undiscovered)


def _kind(taps: list[AnyTap]) -> Kind:
    """The kind of use that all of these are."""
    products = [tap for tap in taps if isinstance(tap, Tap)]
    if not products:
        kinds = {type(tap) for tap in taps}
        return "mixed" if len(kinds) > 1 else "grouped" if GroupedTap in kinds else "elementwise"
    if len(products) < len(taps):
        return "mixed"
    backwards = [tap for tap in products if tap.transposed]
    lookups = bool(backwards) and all(isinstance(tap.inputs, OneHot) for tap in backwards)
    if len(backwards) == len(products):
        return "embedding" if lookups else "matrix"
    if backwards:
        return "tied embedding" if lookups else "tied"
    # Only the patches of a convolution are not kept as they are.
    return "matrix" if all(isinstance(tap.inputs, Tensor) for tap in products) else "convolution"


def _fits(block: Block, taps: list[AnyTap]) -> bool:
    """Whether a block can be estimated from uses of this kind."""
    if isinstance(block, GroupedKroneckerBlock):
        return all(isinstance(tap, GroupedTap) for tap in taps)
    if not isinstance(block, (KroneckerBlock, KroneckerSumBlock)):
        return True  # it needs no more than gradients, or is from outside and knows what it does
    products = [tap for tap in taps if isinstance(tap, Tap)]
    ways = {tap.transposed for tap in products}
    return len(products) == len(taps) and (isinstance(block, KroneckerSumBlock) or len(ways) == 1)


# -------------------------------------------------------------------------------------------- chains

INPUT, OUTPUT = -1, -2
"""Stand for the model's own inputs and outputs among the layers that something depends on."""


@dataclass(frozen=True)
class Chains:
    """How the units of a network follow each other."""

    pieces: list[list[int]]
    """The numbers of the units of every chain, in its order."""
    breaks: dict[int, str]
    """For every unit that begins a further chain, the reason that the one before it ends."""


def chain_network(network: Network, part: Pass) -> Network:
    """The network with its units in the order of their chains, and links between neighbours."""
    pieces = find_chains(network, part).pieces
    order = [number for piece in pieces for number in piece]
    follows = {(a, b) for piece in pieces for a, b in pairwise(piece)}
    links = [pair in follows for pair in pairwise(order)]
    return network.reordered(order, links)


def find_chains(network: Network, part: Pass) -> Chains:
    """The chains of a network, as one pass shows them."""
    uses, outputs, sources = _trace(network, part)
    producers: dict[Any, int] = dict.fromkeys(sources, INPUT)
    # What multiplies numbers one by one, as normalisation layers do, is looked through.
    layers = {n: own for n, own in enumerate(uses.of) if any(use.source is not None for use in own)}
    for n, own in layers.items():
        producers |= {uses.edges[use.edge].node: n for use in own}
    fed_by = {
        n: _ancestors([use.source for use in own if use.source is not None], producers)
        for n, own in layers.items()
    }
    feeds: dict[int, set[int]] = {n: set() for n in fed_by}
    for number, found in [*fed_by.items(), (OUTPUT, _ancestors(outputs, producers))]:
        for n in found - {INPUT}:
            feeds[n].add(number)
    reasons = {n: _unfit(network, uses, n) for n in fed_by}
    following: dict[int, int] = {}
    breaks: dict[int, str] = {}
    for n, sources_of in fed_by.items():
        before = sources_of - {INPUT}
        if reasons[n]:
            breaks[n] = reasons[n]
        elif len(sources_of) != 1 or not before:
            if before:
                breaks[n] = "it is fed by several layers, or by the input too"
        elif reasons[previous := min(before)]:
            breaks[n] = f"{network.units[previous].name!r} before it: {reasons[previous]}"
        elif feeds[previous] != {n}:
            breaks[n] = f"{network.units[previous].name!r} before it feeds something else too"
        else:
            following[previous] = n
    unused = {n: "it is not used" for n, own in enumerate(uses.of) if not own}
    called = sorted(layers, key=lambda n: (layers[n][0].edge, n))
    return Chains(_pieces(called, following, len(network.units)), breaks | unused)


def _pieces(called: list[int], following: dict[int, int], units: int) -> list[list[int]]:
    """Chains in the order in which they begin; then units that are not called."""
    inside = set(following.values())
    pieces = []
    for n in [*called, *(n for n in range(units) if n not in called)]:
        if n in inside:
            continue
        piece = [n]
        while piece[-1] in following:
            piece.append(following[piece[-1]])
        pieces.append(piece)
    return pieces


def _unfit(network: Network, uses: Uses, number: int) -> str:
    """The reason that a unit can't be in a chain; empty if it can."""
    unit, own = network.units[number], uses.of[number]
    if not isinstance(unit.block, KroneckerBlock) or not unit.observed:
        return f"it has a {type(unit.block).__name__}, no Kronecker factors"
    if unit.block.diagonal_grads or unit.block.diagonal_inputs:
        return "one of its factors is diagonal"
    if len(own) != 1:
        return "it is used more than once"
    tap = own[0].tap(
        torch.zeros(uses.outputs[own[0].edge].shape, dtype=unit.dtype, device=network.device)
    )
    if not isinstance(tap, Tap) or tap.transposed or not isinstance(tap.inputs, Tensor):
        return "it is no plain matrix product"
    if tap.grads.shape[1] > 1 and unit.block.sharing == "expand":
        return f"it is used at {tap.grads.shape[1]} places of an example"
    return ""


def _trace(network: Network, part: Pass) -> tuple[Uses, list[Tensor], set[Any]]:
    """Uses with the graph that leads to them, the outputs, and the graph's nodes that are inputs."""
    traced = replace(part, steps=tuple(map(_with_sources, part.steps)))
    sources = {
        leaf.grad_fn
        for call in traced.calls
        for leaf in pytree.tree_leaves((call.args, call.kwargs))
        if isinstance(leaf, Tensor) and leaf.grad_fn is not None
    }
    outputs, seen = _run(network, traced, keep_sources=True)
    return seen.uses, outputs, sources


def _with_sources(step: ModelCall | Operation) -> ModelCall | Operation:
    if not isinstance(step, ModelCall):
        return step
    args, kwargs = pytree.tree_map(_source, (step.args, step.kwargs))
    return replace(step, args=args, kwargs=kwargs)


def _source(value: Any) -> Any:
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    leaf = value.detach().clone().requires_grad_()
    with torch.enable_grad():
        return leaf.view_as(leaf)  # a node to recognise it by


def _ancestors(tensors: Iterable[Tensor], producers: dict[Any, int]) -> set[int]:
    """The nearest of the producers that tensors were computed from."""
    found: set[int] = set()
    visited: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn for tensor in tensors]
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
