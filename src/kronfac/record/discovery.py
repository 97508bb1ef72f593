"""Blocks for parameters that no adapter describes, chosen by their uses in the first pass.

A parameter that is used by functions that K-FAC understands gets the block for uses of that kind. One that
is used in another way gets a diagonal block, from its gradient alone. So does one whose layer uses it in
another way than its adapter says, unless it is small.
"""

from dataclasses import replace

import torch
from torch import Tensor

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
from kronfac.record.batch import Pass
from kronfac.warn import warn


def discover(network: Network, part: Pass) -> Network:
    """The network with a block for every unit that fits how it is used in this pass."""
    if network.discovered:
        return network
    record = record_uses(network.sites, network.units, part.examples, dims=part.dims)
    with torch.enable_grad(), record as seen:
        part.run(network.model)
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
