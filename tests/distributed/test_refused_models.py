"""Models spread over processes as KFAC can't train them are refused by name."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from kronfac import KFAC
from tests.conftest import mlp
from tests.distributed.refused_models import train

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the ranks of gloo groups on the loopback interface found, by the size of the group."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = {}
    for ranks in (1, 2):
        directory = tmp_path_factory.mktemp("ranks")
        for rank in range(ranks):
            command = [sys.executable, "-m", "tests.distributed.refused_models", str(directory)]
            processes[ranks, directory / f"{rank}.json"] = subprocess.Popen(
                [*command, str(rank), str(ranks)], cwd=ROOT, env=environment
            )
    try:
        assert [process.wait(timeout=600) for process in processes.values()] == [0, 0, 0]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    results = {1: [], 2: []}
    for ranks, path in processes:
        results[ranks].append(json.loads(path.read_text()))
    return results


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
    assert one_rank["parameters"] == [p.tolist() for p in optimizer.model.parameters()]
