"""Refusal of training in several processes, of which K-FAC knows nothing yet.

Every rank would average its own statistics, choose its own λ and γ and take its own step. The ranks would
train apart without a word, and DistributedDataParallel does not see K-FAC's own passes.
"""

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kronfac.errors import UnsupportedModelError


def refuse_several_processes() -> None:
    """Refuse a process group with more than one rank.

    Raises:
        UnsupportedModelError: there is one.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    ranks = torch.distributed.get_world_size()
    if ranks > 1:
        raise UnsupportedModelError(
            f"KFAC trains in one process; torch.distributed is initialized with {ranks} ranks, which would "
            "each take a step of their own and train apart. Run it in a single process, or call "
            "torch.distributed.destroy_process_group() before."
        )


def refuse_distributed(model: nn.Module) -> None:
    """Refuse a model that is spread over processes, whatever their number.

    Raises:
        UnsupportedModelError: it is or contains DistributedDataParallel or FullyShardedDataParallel, or
            has parameters that are DTensors.
    """
    wrappers = (
        DistributedDataParallel,
        *_imported("torch.distributed.fsdp", "FullyShardedDataParallel"),
    )
    for name, module in model.named_modules():
        if isinstance(module, wrappers):
            where = f"module {name!r} of the model" if name else "the model"
            raise UnsupportedModelError(
                f"KFAC trains a model that is whole in one process; {where} is a "
                f"{type(module).__name__}. Give KFAC the module inside, model.module, and train it in a "
                "single process."
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
            "KFAC trains a model that is whole in one process; these parameters are DTensors: "
            f"{', '.join(map(repr, names))}. Make KFAC from a model to which neither fully_shard nor "
            "distribute_tensor was applied."
        )


def _imported(module: str, name: str) -> tuple[type, ...]:
    """A class, if anybody has imported it: nothing is an instance of it otherwise."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
