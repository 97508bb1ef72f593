"""What the first pass shows of a network: blocks of parameters that no adapter describes, and chains.

A parameter that is used by functions that K-FAC understands gets the block for uses of that kind. One that
is used in another way gets a diagonal block, from its gradient alone. So does one whose layer uses it in
another way than its adapter says, unless it is small.

In a chain, each layer is fed by the one before alone, which feeds nothing else [MG15 §4.3]. That is read
off the autograd graph of the pass: from the outputs of a layer the graph is followed back to the outputs of
other layers, and to the model's own inputs. A network may have several chains; at branches, and at layers
that use their weights at several places, they end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kronfac.curvature import (
    AnyTap,
    Block,
    Curvature,
    DiagonalBlock,
    GroupedKroneckerBlock,
    GroupedTap,
    KroneckerBlock,
    KroneckerSumBlock,
    OneHot,
    Tap,
)
from kronfac.errors import StateError
from kronfac.model.blocks import Blocks, Kind
from kronfac.model.functions import SeeFunctions, record_uses
from kronfac.model.nested import tensors_of
from kronfac.model.network import ExampleDims, Learned, Network, Unit, UnitState
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


def _run(network: Network, part: Pass) -> tuple[list[Tensor], SeeFunctions]:
    """The outputs of a pass, with their graph, and the uses in it."""
    uses = record_uses(network.sites, network.units, part.examples, dims=part.dims)
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


# ----------------------------------------------------------------------------------------- saved states


def learned_state(network: Network) -> Learned:
    """What passes have shown of the network, to be saved."""
    units = network.units if network.discovered else ()
    return network.learned.copy(tuple(UnitState(unit.kind, unit.observed) for unit in units))


def restored(
    network: Network, order: Sequence[int], curvature: Curvature | None, state: Learned
) -> Network:
    """The network as it was when a state was saved: its units' order and links, and their blocks.

    Raises:
        StateError: what passes have shown, or the curvature, is not of these units.
    """
    if not all(isinstance(dims, ExampleDims) for dims in state.dims.values()):
        raise StateError(
            "The state's learned.dims must hold ExampleDims for each kind of pass. Load an earlier state."
        )
    network = replace(network, learned=state.copy())
    if curvature is not None:
        network = network.reordered(order, [link is not None for link in curvature.links])
    if state.units:
        if len(state.units) != len(network.units):
            raise StateError(
                f"The state's learned.units must have one entry for each of {len(network.units)} units; "
                f"got {len(state.units)}. Load an earlier state."
            )
        pairs = zip(network.units, state.units, strict=True)
        units = [_restored(unit, shown, network.blocks) for unit, shown in pairs]
        network = replace(network, units=units, discovered=True)
    for unit, moments in zip(network.units, curvature.blocks if curvature else (), strict=False):
        if not isinstance(moments, unit.block.moments):
            raise StateError(
                f"The state's statistics of {unit.name!r} are {type(moments).__name__}; this KFAC has "
                f"a {type(unit.block).__name__} for it. Use the block that it was saved with."
            )
    return network


def _restored(unit: Unit, state: UnitState, blocks: Blocks) -> Unit:
    """A unit with the block that it got in the first pass of the run that is resumed."""
    unit = unit.undiscovered
    if not state.observed:
        return unit.unobserved("not all uses of it were seen when the state was saved")
    if not state.kind:
        return unit
    kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
    if state.kind not in kinds:
        raise StateError(
            f"The state's kind of use of {unit.name!r} must be one of {tuple(kinds)}; got {state.kind!r}. "
            "Load an earlier state."
        )
    kind = kinds[state.kind]
    return replace(unit, block=blocks.choose(kind, *unit.shape), kind=kind, original=unit)


# -------------------------------------------------------------------------------------------- chains

INPUT, OUTPUT = -1, -2
"""Stand for the model's own inputs and outputs among the layers that something depends on."""


def chain_network(network: Network, part: Pass) -> Network:
    """The network with its units in the order of their chains, and links between neighbours."""
    pieces = find_chains(network, part)
    order = [number for piece in pieces for number in piece]
    follows = {(a, b) for piece in pieces for a, b in pairwise(piece)}
    links = [pair in follows for pair in pairwise(order)]
    return network.reordered(order, links)


def find_chains(network: Network, part: Pass) -> list[list[int]]:
    """The numbers of the units of every chain in its order, as one pass shows them."""
    traced = replace(part, steps=tuple(map(_with_nodes, part.steps)))
    outputs, seen = _run(network, traced)
    uses = seen.uses
    # What multiplies numbers one by one, as normalisation layers do, is looked through.
    layers = {n: own for n, own in enumerate(uses.of) if any(use.product for use in own)}
    producers: dict[Any, int] = {
        leaf.grad_fn: INPUT
        for call in traced.calls
        for leaf in tensors_of((call.args, call.kwargs))
        if leaf.grad_fn is not None
    }
    nodes = {n: {uses.edges[use.edge].node for use in own} for n, own in layers.items()}
    producers |= {node: n for n, own in nodes.items() for node in own}
    fed_by = {
        n: _ancestors((parent for node in own for parent, _ in node.next_functions), producers)
        for n, own in nodes.items()
    }
    feeds: dict[int, set[int]] = {n: set() for n in layers}
    for number, found in [
        *fed_by.items(),
        (OUTPUT, _ancestors((z.grad_fn for z in outputs), producers)),
    ]:
        for n in found - {INPUT}:
            feeds[n].add(number)
    fits = {n: _fits_chain(network, uses, n) for n in layers}
    following: dict[int, int] = {}
    for n, sources in fed_by.items():
        previous = min(sources - {INPUT}, default=n)
        if fits[n] and fits[previous] and len(sources) == 1 and feeds[previous] == {n}:
            following[previous] = n
    called = sorted(layers, key=lambda n: (layers[n][0].edge, n))
    return _pieces(called, following, len(network.units))


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


def _fits_chain(network: Network, uses: Uses, number: int) -> bool:
    """Whether a unit is one plain product, at one place of an example, with Kronecker factors."""
    unit, own = network.units[number], uses.of[number]
    if not (isinstance(unit.block, KroneckerBlock) and unit.observed and len(own) == 1):
        return False
    if unit.block.diagonal_grads or unit.block.diagonal_inputs:
        return False
    like = uses.outputs[own[0].edge]
    tap = own[0].tap(torch.zeros(like.shape, dtype=unit.dtype, device=network.device))
    if not isinstance(tap, Tap) or tap.transposed or not isinstance(tap.inputs, Tensor):
        return False
    return tap.grads.shape[1] == 1 or unit.block.sharing != "expand"


def _with_nodes(step: ModelCall | Operation) -> ModelCall | Operation:
    """The step with nodes of the graph for its inputs, to recognise them by."""
    if not isinstance(step, ModelCall):
        return step
    args, kwargs = pytree.tree_map(_with_node, (step.args, step.kwargs))
    return replace(step, args=args, kwargs=kwargs)


def _with_node(value: Any) -> Any:
    if not (isinstance(value, Tensor) and value.is_floating_point()):
        return value
    leaf = value.detach().clone().requires_grad_()
    with torch.enable_grad():
        return leaf.view_as(leaf)


def _ancestors(nodes: Iterable[Any], producers: dict[Any, int]) -> set[int]:
    """The nearest of the producers among nodes of the graph and what led to them."""
    found: set[int] = set()
    visited: set[Any] = set()
    stack = list(nodes)
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
