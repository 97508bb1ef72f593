"""Models that torch's `fully_shard` was applied to train as plain ones do, whatever happens to them."""

from pathlib import Path

import pytest
import torch

from tests.distributed.sharded_cases import SHARDED
from tests.distributed.test_equal_steps import TOLERANCE, run

SIZES = (1, 2)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("worlds"), SHARDED, SIZES)


@pytest.mark.parametrize("name", SHARDED)
def test_a_sharded_model_trains_as_a_plain_one_does(found: Path, name: str) -> None:
    ranks = [
        torch.load(found / f"{name}-{size}-{rank}.pt", weights_only=True)
        for size in SIZES
        for rank in range(size)
    ]
    expected = ranks[0]["parameters"]
    for rank in ranks:
        assert all(rank["flags"].values()), rank["flags"]
        assert float((rank["parameters"] - expected).norm() / expected.norm()) <= TOLERANCE
    assert torch.equal(ranks[1]["parameters"], ranks[2]["parameters"])
