"""The preconditioner in several processes, one of which fails or is at another step."""

from pathlib import Path

import pytest
import torch

from tests.distributed.preconditioned import CASES, FAULTS
from tests.distributed.test_equal_steps import load, run

RANKS = 3


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("broken"), CASES, (RANKS,))


@pytest.mark.parametrize("name", FAULTS)
def test_no_rank_replaces_gradients_if_one_of_them_can_not(broken: Path, name: str) -> None:
    *others, failed = load(broken, f"front-{name}", RANKS)
    for rank in (*others, failed):
        assert not rank["moved"]
        assert torch.equal(rank["disturbed"], rank["undisturbed"])
    if name == "one_is_not_finite":
        assert not any(rank["said"] for rank in (*others, failed))
        return
    assert failed["said"].startswith("BrokenError")
    for rank in others:
        assert rank["said"].startswith(f"RankError: Rank {RANKS - 1} has failed")


def test_ranks_that_are_not_at_the_same_step_are_told(broken: Path) -> None:
    for found in load(broken, "front-other_steps", RANKS):
        assert "different numbers of steps" in found["said"]
