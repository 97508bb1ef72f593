"""Models that are spread over processes: what is inside a wrapper, and what can't be trained."""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kronfac.errors import UnsupportedModelError


def refuse_several_processes(who: str) -> None:
    """Refuse a process group with more than one rank.

    Raises:
        UnsupportedModelError: there is one.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ranks = torch.distributed.get_world_size()
    if ranks > 1:
        raise UnsupportedModelError(
            f"{who} works in one process; torch.distributed is initialized with {ranks} ranks, which would "
            "each have statistics of their own and train apart. Run it in a single process, or use KFAC."
        )


def refuse_distributed(model: nn.Module) -> None:
    """Refuse a model that is spread over processes in another way than by DistributedDataParallel.

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
                f"{type(module).__name__}. Use a plain model, or wrap all of it in "
                "DistributedDataParallel."
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise UnsupportedModelError(
                f"KFAC trains a model on one device; {name or 'the model'!r} is a DataParallel over "
                f"{len(module.device_ids)} devices, whose copies of the layers KFAC can't follow. Give "
                "KFAC the module inside, model.module, and call that."
            )
    sharded = _imported("torch.distributed.tensor", "DTensor")
    names = [name for name, p in model.named_parameters() if isinstance(p, sharded)]
    if names:
        raise UnsupportedModelError(
            "KFAC trains a model of which every process has all parameters; these are DTensors: "
            f"{', '.join(map(repr, names))}. Make KFAC from a model to which neither fully_shard nor "
            "distribute_tensor was applied."
        )


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
    """Whether backward passes average the gradients over the ranks: it is DistributedDataParallel's."""
    original = getattr(model, "_orig_mod", model)
    return isinstance(original, DistributedDataParallel)


def _imported(module: str, name: str) -> tuple[type, ...]:
    """A class, if anybody has imported it: nothing is an instance of it otherwise."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
