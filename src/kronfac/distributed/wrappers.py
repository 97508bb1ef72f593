"""Models inside DistributedDataParallel or torch.compile, and models that KFAC refuses to train."""

import sys

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kronfac.errors import UnsupportedModelError


def refuse_distributed(model: nn.Module) -> None:
    """Refuse a model whose parameters are spread over processes or devices.

    Raises:
        UnsupportedModelError: the model contains DistributedDataParallel or a DataParallel over several
            devices, is or contains FullyShardedDataParallel, or has parameters that are DTensors, as after
            `fully_shard`.
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
                f"kronfac trains models of which every process holds all parameters; {where} is a "
                f"{type(module).__name__}. Use a plain model, or wrap all of it in "
                "DistributedDataParallel."
            )
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            raise UnsupportedModelError(
                f"kronfac trains a model on one device; got {repr(name) + ', ' if name else ''}"
                f"a DataParallel over {len(module.device_ids)} devices, whose copies of the layers it "
                "can't follow. Give it the module inside, model.module, and call that."
            )
    sharded = _imported("torch.distributed.tensor", "DTensor")
    names = [name for name, p in model.named_parameters() if isinstance(p, sharded)]
    if names:
        raise UnsupportedModelError(
            "kronfac trains models of which every process holds all parameters; fully_shard or "
            f"distribute_tensor has made these DTensors: {', '.join(map(repr, names))}. Wrap the model in "
            "DistributedDataParallel instead."
        )


def inner_model(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` or DistributedDataParallel wrapped, or the model itself."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if isinstance(model, DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def averages_gradients(model: nn.Module) -> bool:
    """Whether backward passes average gradients over ranks, as DistributedDataParallel does."""
    return isinstance(getattr(model, "_orig_mod", model), DistributedDataParallel)


def _imported(module: str, name: str) -> tuple[type, ...]:
    """A class if its module has been imported, else nothing: then no object is an instance of it."""
    found = getattr(sys.modules.get(module), name, None)
    return () if found is None else (found,)
