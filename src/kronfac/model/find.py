"""Which units a model has: what each trained parameter gets."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
from torch import nn

from kronfac.curvature import DiagonalBlock
from kronfac.errors import UnsupportedModelError
from kronfac.model.blocks import Blocks
from kronfac.model.network import Network, Unit, refuse_dtypes
from kronfac.model.registry import Adapter, Layer, Site, adapter_for, block_of
from kronfac.model.side_effects import Buffers
from kronfac.objective import Objective


@dataclass(frozen=True)
class Found:
    """The units of a model."""

    units: list[Unit]
    sites: list[Site]


def find_network(
    model: nn.Module,
    objective: Objective,
    blocks: Blocks | None = None,
    trained: Collection[nn.Parameter] | None = None,
) -> Network:
    """The model with the units of these parameters; None for all that are not frozen."""
    blocks = Blocks() if blocks is None else blocks
    found = find_units(model, blocks, trained)
    return Network(model, found.units, found.sites, objective, Buffers(model), blocks)


def find_units(
    model: nn.Module,
    blocks: Blocks | None = None,
    among: Collection[nn.Parameter] | None = None,
) -> Found:
    """The units of all trained parameters, in the order of `model.named_modules()`.

    Parameters of one module that are used together form one unit; a parameter that several modules share is
    a unit of its own. What no adapter describes gets a block by what the first pass shows of its uses
    (`discovery.py`), a diagonal one if they are not seen, or is refused. What is not `among` the given
    parameters counts as frozen.

    Raises:
        UnsupportedModelError: a module or parameter is refused, has a dtype that K-FAC can't train, or
            there is none.
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"KFAC needs modules whose Python code it can follow; {name or 'the model'!r} is compiled "
                "by torch.jit. Train the module that it was made from, and compile it afterwards."
            )
    blocks = Blocks() if blocks is None else blocks
    owners = _owners(model)
    allowed = None if among is None else {id(p) for p in among}
    units: list[Unit] = []
    sites: list[Site] = []
    found: set[int] = set()
    refused: list[tuple[str, str]] = []
    for prefix, module in model.named_modules():
        own = {
            key: p
            for key, p in module.named_parameters(recurse=False)
            if p.requires_grad and (allowed is None or id(p) in allowed)
        }
        adapter = adapter_for(module) if own else None
        if adapter is not None and not own.keys() <= adapter.parameters(module).keys():
            # Reparametrised by hooks (spectral_norm, pruning): the weight is computed from others.
            adapter = None
        if isinstance(adapter, Layer) and (why := adapter.refusal(module)):
            raise UnsupportedModelError(
                f"KFAC can't train {prefix!r} ({type(module).__name__}): {why}"
            )
        groups = _groups(adapter, module, own, owners)
        if (
            adapter is not None
            and hasattr(adapter, "uses")
            and any(described for _, described in groups)
        ):
            sites.append(Site(prefix, module, adapter))
        for keys, described in groups:
            parameters = tuple(own[k] for k in keys)
            if id(parameters[0]) in found:
                continue  # shared, and found before
            found |= {id(p) for p in parameters}
            if not described and blocks.unsupported == "refuse":
                refused.append((_join(prefix, keys[0]), type(module).__name__))
            whole = described and [keys] == [k for k, d in groups if d] and len(own) == len(keys)
            unit = Unit(
                prefix if whole else _join(prefix, keys[0]),
                tuple(_join(prefix, k) for k in keys),
                parameters,
                DiagonalBlock(),
                swapped=adapter.swapped(module) if isinstance(adapter, Layer) else 0,
                chosen=described,
            )
            if described and adapter is not None:
                block = block_of(adapter, module, keys[0], unit.shape, blocks)
                unit = replace(unit, block=block)
            units.append(unit)
    _check(model, units, refused)
    return Found(units, sites)


def _groups(
    adapter: Adapter | None,
    module: nn.Module,
    own: dict[str, nn.Parameter],
    owners: dict[int, list[Adapter | None]],
) -> list[tuple[list[str], bool]]:
    """The trained parameters of a module, divided into units, and whether an adapter describes them."""
    if adapter is None:
        return [([key], False) for key in own]
    given = (
        adapter.groups(module)
        if isinstance(adapter, Layer)
        else [tuple(adapter.parameters(module))]
    )
    groups: list[tuple[list[str], bool]] = []
    for names in given:
        keys = [key for key in names if key in own]
        together = [key for key in keys if len(owners[id(own[key])]) == 1]
        groups += [(together, True)] if together else []
        # Shared with a module that uses it in another way, what it needs shows in the first pass.
        groups += [
            ([key], len({type(a) for a in owners[id(own[key])]}) == 1)
            for key in keys
            if key not in together
        ]
    return groups


def _owners(model: nn.Module) -> dict[int, list[Adapter | None]]:
    """For every parameter, the adapters of all modules that have it."""
    owners: dict[int, list[Adapter | None]] = defaultdict(list)
    for module in model.modules():
        adapter = adapter_for(module)
        described = set(adapter.parameters(module)) if adapter is not None else set()
        for key, p in module._parameters.items():
            if p is not None:
                owners[id(p)].append(adapter if key in described else None)
    return owners


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _check(model: nn.Module, units: list[Unit], refused: list[tuple[str, str]]) -> None:
    if refused:
        listed = ", ".join(f"{name!r} ({kind})" for name, kind in refused)
        raise UnsupportedModelError(
            f'Blocks(unsupported="refuse") refuses parameters of layers that KFAC does not know: {listed}. '
            'Leave unsupported="diagonal", the default, which gives them a diagonal block; tell '
            "kronfac.register how they use their parameters; or freeze them with requires_grad_(False)."
        )
    if not units:
        raise UnsupportedModelError(
            f"KFAC found no trainable parameter in {type(model).__name__}; it has nothing to train."
        )
    refuse_dtypes(units)
