"""The refusals of one rank: `python -m tests.distributed.refused_models DIRECTORY RANK RANKS`.

Each rank leaves a file with the message of every refusal, and None for what was not refused.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from kronfac import KFAC, Preconditioner
from kronfac.errors import UnsupportedModelError
from tests.conftest import mlp, normal

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


def main(directory: Path, rank: int, ranks: int) -> None:
    before = KFAC(mlp([4, 5, 3]), nn.MSELoss())
    store = f"file://{directory / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    models: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: mlp([4, 5, 3]),
        "ddp": lambda: DistributedDataParallel(mlp([4, 5, 3])),
        "ddp_inside": lambda: nn.Sequential(nn.Tanh(), DistributedDataParallel(mlp([4, 5, 3]))),
        "fsdp": lambda: FullyShardedDataParallel(mlp([4, 5, 3]), device_id=torch.device("cpu")),
        "fully_shard": lambda: fully_shard(mlp([4, 5, 3]), mesh=init_device_mesh("cpu", (ranks,))),
        "fully_shard_inside": lambda: sharded_inside(ranks),
        "dtensor": lambda: sharded_parameter(ranks),
    }
    said = {name: refusal(partial(KFAC, make(), nn.MSELoss())) for name, make in models.items()}
    said["preconditioner"] = refusal(
        lambda: Preconditioner(models["fully_shard"](), nn.MSELoss(), damping=1e-2)
    )
    said["step"] = refusal(lambda: train(before))
    state = [p.tolist() for p in before.model.parameters()]
    torch.distributed.destroy_process_group()
    result = {"said": said, "parameters": state}
    (directory / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
