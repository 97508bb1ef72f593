"""Models spread over processes: the message of every refusal."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from kronfac import KFAC, Preconditioner
from kronfac.errors import UnsupportedModelError
from tests.conftest import mlp, normal
from tests.distributed.ranks import Case

STEPS = 3


def train(optimizer: KFAC) -> None:
    for k in range(STEPS):
        optimizer.step(optimizer.closure(normal(9, 4, seed=k), normal(9, 3, seed=k + 100)))


def refusal(use: Callable[[], object]) -> str | None:
    try:
        use()
    except UnsupportedModelError as error:
        return str(error)
    return None


def sharded_parameter(ranks: int) -> nn.Module:
    model = mlp([4, 5, 3])
    mesh = init_device_mesh("cpu", (ranks,))
    weight = distribute_tensor(model[2].weight.detach(), mesh, [Replicate()])
    model[2].weight = nn.Parameter(weight)
    return model


def sharded_inside(ranks: int) -> nn.Module:
    model = mlp([4, 5, 3])
    fully_shard(model[0], mesh=init_device_mesh("cpu", (ranks,)))
    return model


def refusals(rank: int, size: int) -> Mapping[str, Any]:
    """The message of every refusal; None for a model that was not refused."""
    models: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: mlp([4, 5, 3]),
        "ddp": lambda: DistributedDataParallel(mlp([4, 5, 3])),
        "ddp_inside": lambda: nn.Sequential(nn.Tanh(), DistributedDataParallel(mlp([4, 5, 3]))),
        "fsdp": lambda: FullyShardedDataParallel(mlp([4, 5, 3]), device_id=torch.device("cpu")),
        "fully_shard": lambda: fully_shard(mlp([4, 5, 3]), mesh=init_device_mesh("cpu", (size,))),
        "fully_shard_inside": lambda: sharded_inside(size),
        "dtensor": lambda: sharded_parameter(size),
    }
    optimizer = KFAC(mlp([4, 5, 3]), nn.MSELoss())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        said = {name: refusal(partial(KFAC, make(), nn.MSELoss())) for name, make in models.items()}
        said["preconditioner"] = refusal(
            lambda: Preconditioner(models["fully_shard"](), nn.MSELoss(), damping=1e-2)
        )
    said["step"] = refusal(lambda: train(optimizer))
    parameters = [p.detach() for p in optimizer.model.parameters()]
    return {"said": said, "parameters": parameters}


CASES: dict[str, Case] = {"refusals": refusals}
