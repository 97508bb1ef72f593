"""Models spread over processes as KFAC can't train them are refused by name."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kronfac import KFAC
from tests.conftest import mlp
from tests.distributed.refused_models import train
from tests.distributed.test_equal_steps import load, run


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What the ranks found, by the size of the world."""
    folder: Path = run(tmp_path_factory.mktemp("ranks"), ["refusals"], (1, 2))
    return {size: load(folder, "refusals", size) for size in (1, 2)}


WRAPPED = {
    "ddp_inside": "module '1' of the model is a DistributedDataParallel",
    "fsdp": "the model is a FullyShardedDataParallel",
    "fully_shard": r"fully_shard .*: '0.weight', '0.bias', '2.weight', '2.bias'\. Wrap .* DistributedData",
    "fully_shard_inside": "fully_shard .*: '0.weight', '0.bias'\\. Wrap .* DistributedDataParallel",
    "preconditioner": "fully_shard .*: '0.weight', '0.bias', '2.weight', '2.bias'",
    "dtensor": "DTensors: '2.weight'",
}


@pytest.mark.parametrize("use", ["plain", "ddp"])
def test_plain_models_and_data_parallel_ones_are_not_refused(found, use):
    for rank in (*found[1], *found[2]):
        assert rank["said"][use] is None


@pytest.mark.parametrize("use", WRAPPED)
def test_models_that_are_spread_over_processes_are_refused_by_name(found, use):
    for rank in (*found[1], *found[2]):
        assert re.search(WRAPPED[use], rank["said"][use])


def test_a_world_of_one_rank_trains_as_without_a_process_group(found):
    (one_rank,) = found[1]
    assert one_rank["said"]["plain"] is None
    assert one_rank["said"]["step"] is None
    optimizer = KFAC(mlp([4, 5, 3]), nn.MSELoss())
    train(optimizer)
    for found_p, p in zip(one_rank["parameters"], optimizer.model.parameters(), strict=True):
        assert torch.equal(found_p, p)
