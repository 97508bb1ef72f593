"""Which units a model has: what each trained parameter gets."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from kronfac.curvature import Block, DiagonalBlock
from kronfac.errors import UnsupportedModelError
from kronfac.network.adapter import Adapter, adapter_for, block_of, known_types
from kronfac.network.unit import Unit

Other = Literal["diagonal", "refuse"]


@dataclass(frozen=True)
class Site:
    """A module with an adapter, and where its parameters' columns go."""

    name: str
    module: nn.Module
    adapter: Adapter
    columns: tuple[tuple[int, tuple[str, ...]], ...]
    """For every unit that has parameters here, its number and their names in the module."""


@dataclass(frozen=True)
class Found:
    """The units of a model."""

    units: list[Unit]
    sites: list[Site]
    """The modules whose calls are uses of units with a Kronecker block."""


def find_units(model: nn.Module, other: Other = "diagonal") -> Found:
    """The units of all trained parameters, in the order of `model.named_modules()`.

    Parameters of one module that are used together form one unit; a parameter that several modules share is
    a unit of its own. What no adapter describes gets a diagonal block, or is refused.

    Raises:
        UnsupportedModelError: a parameter is refused, has a dtype that K-FAC can't train, or there is none.
    """
    owners = _owners(model)
    units: list[Unit] = []
    number: dict[int, int] = {}  # the unit of each parameter
    claims: list[tuple[str, nn.Module, Adapter, dict[str, nn.Parameter]]] = []
    refused: list[tuple[str, str]] = []
    for prefix, module in model.named_modules():
        own = {key: p for key, p in module.named_parameters(recurse=False) if p.requires_grad}
        adapter = adapter_for(module) if own else None
        described: dict[str, nn.Parameter] = {}
        if adapter is not None:
            described = {key: p for key, p in adapter.parameters(module).items() if p.requires_grad}
            if not own.keys() <= described.keys():
                # Reparametrised by hooks (spectral_norm, pruning): the weight is computed from others.
                described = {}
        # Shared with a module that no adapter describes, a parameter has uses that nobody sees.
        described = {k: p for k, p in described.items() if all(owners[id(p)])}
        if adapter is not None and described:
            claims.append((prefix, module, adapter, described))
        together = [k for k, p in described.items() if len(owners[id(p)]) == 1]
        groups = [together] if together else []
        groups += [[k] for k in own if k not in together]
        for keys in groups:
            parameters = [own[k] for k in keys]
            if id(parameters[0]) in number:
                continue  # shared, and found before
            kronecker = keys[0] in described
            if not kronecker and other == "refuse":
                refused.append((_join(prefix, keys[0]), type(module).__name__))
            for p in parameters:
                number[id(p)] = len(units)
            name = prefix if keys == list(described) else _join(prefix, keys[0])
            names = tuple(_join(prefix, k) for k in keys)
            block: Block = DiagonalBlock()
            if kronecker and adapter is not None:
                block = block_of(adapter, module)
            units.append(Unit(name, names, tuple(parameters), block))
    _check(model, units, refused)
    sites = [
        Site(prefix, module, adapter, _columns(described, number))
        for prefix, module, adapter, described in claims
    ]
    return Found(units, sites)


def _owners(model: nn.Module) -> dict[int, list[bool]]:
    """For every parameter and every module that has it, whether an adapter describes it there."""
    owners: dict[int, list[bool]] = defaultdict(list)
    for module in model.modules():
        adapter = adapter_for(module)
        described = set(adapter.parameters(module)) if adapter is not None else set()
        for key, p in module._parameters.items():
            if p is not None:
                owners[id(p)].append(key in described)
    return owners


def _columns(
    described: dict[str, nn.Parameter], number: dict[int, int]
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    columns: dict[int, list[str]] = defaultdict(list)
    for key, p in described.items():
        columns[number[id(p)]].append(key)
    return tuple((unit, tuple(keys)) for unit, keys in columns.items())


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _check(model: nn.Module, units: list[Unit], refused: list[tuple[str, str]]) -> None:
    if refused:
        raise UnsupportedModelError(refusal(refused))
    if not units:
        raise UnsupportedModelError(
            f"KFAC found no trainable parameter in {type(model).__name__}; it has nothing to train."
        )
    others = [
        u for u in units if any(p.dtype not in (torch.float32, torch.float64) for p in u.parameters)
    ]
    if others:
        named = ", ".join(f"{u.name!r} ({u.dtype})" for u in others)
        raise UnsupportedModelError(
            f"KFAC needs real parameters in float32 or float64; got {named}. Half precision is for the "
            "closure: call step inside torch.autocast."
        )


def refusal(parameters: Sequence[tuple[str, str]]) -> str:
    """The message that refuses parameters, given by name and module type: all at once, by type."""
    by_type: dict[str, list[str]] = defaultdict(list)
    for name, kind in parameters:
        by_type[kind].append(name)
    listed = "; ".join(f"{kind}: {', '.join(names)}" for kind, names in by_type.items())
    return (
        f'KFAC(other="refuse") takes layers that it knows: {", ".join(known_types())}. Of others there are '
        f'{listed}. Leave other="diagonal", the default, which gives them a diagonal block; tell '
        "kronfac.register how they use their parameters; or freeze them with requires_grad_(False)."
    )
