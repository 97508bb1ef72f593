"""Models that are spread over processes: what is inside a wrapper, and what can't be trained."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kronfac.errors import UnsupportedModelError


def refuse_distributed(model: nn.Module, *, shards: bool = False) -> None:
    """Refuse a model that is spread over processes in another way than by DistributedDataParallel.

    Args:
        model: to be looked at.
        shards: whether one that all of torch's `fully_shard` was applied to will do.

    Raises:
        UnsupportedModelError: it contains DistributedDataParallel, is or contains
            FullyShardedDataParallel, or has parameters that are DTensors.
    """
    model = inner_model(model)
    wrappers = (
        DistributedDataParallel,
        *_imported("torch.distributed.fsdp", "FullyShardedDataParallel"),
    )
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            where = f"module {name!r} of the model" if name else "the model"
            raise UnsupportedModelError(
                f"KFAC trains a model of which every process has all parameters; {where} is a "
                f"{type(module).__name__}. Use a plain model, wrap all of it in "
                "DistributedDataParallel, or apply fully_shard to it."
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise UnsupportedModelError(
                f"KFAC trains a model on one device; {name or 'the model'!r} is a DataParallel over "
                f"{len(module.device_ids)} devices, whose copies of the layers KFAC can't follow. Give "
                "KFAC the module inside, model.module, and call that."
            )
    if shards and fully_sharded(model):
        _refuse_shards(model)
        return
    sharded = _imported("torch.distributed.tensor", "DTensor")
    names = [name for name, p in model.named_parameters() if isinstance(p, sharded)]
    if names:
        raise UnsupportedModelError(
            "KFAC trains a model of which every process has all parameters, or one that fully_shard was "
            f"applied to itself, not only to parts of it; these are DTensors: "
            f"{', '.join(map(repr, names))}. Call fully_shard(model) too, or make KFAC from a model to "
            "which neither fully_shard nor distribute_tensor was applied."
        )


def _refuse_shards(model: nn.Module) -> None:
    """Refuse what `fully_shard` can do and KFAC can't.

    Raises:
        UnsupportedModelError: parameters are sharded over a part of the processes, along two dimensions of
            a mesh, or not at all; or passes are in another dtype than theirs.
    """
    reshard(model)
    (kind,) = _imported("torch.distributed.tensor", "DTensor")
    ranks = torch.distributed.get_world_size()
    for name, p in model.named_parameters():
        if isinstance(p, kind):
            mesh = p.device_mesh  # type: ignore[attr-defined]
            if mesh.ndim == 1 and mesh.size() == ranks:
                continue
            got = f"is on a mesh {tuple(mesh.shape)} of {ranks} processes"
        elif p.requires_grad:
            got = "is not sharded, and nobody averages its gradient"
        else:
            continue
        raise UnsupportedModelError(
            "KFAC trains a model whose parameters fully_shard has all sharded over all processes, in one "
            f"dimension; {name!r} {got}. Call fully_shard with a mesh of one dimension, and without "
            "ignored_params."
        )
    for name, module in model.named_modules():
        if not fully_sharded(module):
            continue
        policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
        dtype = getattr(policy, "param_dtype", None)
        if dtype not in (None, next(model.parameters()).dtype):
            raise UnsupportedModelError(
                "KFAC sees the passes of a sharded model only in its parameters' own dtype; "
                f"{name or 'the model'!r} has a MixedPrecisionPolicy with param_dtype={dtype}. Leave it "
                "out."
            )


def fully_sharded(model: nn.Module) -> bool:
    """Whether torch's `fully_shard` was applied to this module itself."""
    return isinstance(model, _imported("torch.distributed.fsdp", "FSDPModule"))


def reshard(model: nn.Module) -> None:
    """Have shards for parameters: after an evaluation FSDP leaves whole ones, for the next forward pass."""
    for module in model.modules():
        if fully_sharded(module):
            module.reshard()  # type: ignore[operator]


def inner_model(model: nn.Module) -> nn.Module:
    """What `torch.compile` or DistributedDataParallel wrapped, where hooks fire; or the model itself."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def averages_gradients(model: nn.Module) -> bool:
    """Whether backward passes average gradients over ranks, as DistributedDataParallel and FSDP do."""
    original = getattr(model, "_orig_mod", model)
    return isinstance(original, DistributedDataParallel) or fully_sharded(original)


def _imported(module: str, name: str) -> tuple[type, ...]:
    """A class, if anybody has imported it: nothing is an instance of it otherwise."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
