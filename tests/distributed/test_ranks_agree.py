"""What happens on one rank is decided alike on all of them, and none waits for ever."""

from pathlib import Path

import pytest
import torch

from tests.distributed.disagreements import CASES, DEADLY, FAULTS, PLACES
from tests.distributed.test_equal_steps import load, run

SIZE = 3


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("disagreements")
    return run(folder, [name for name in CASES if name not in DEADLY], (SIZE,))


@pytest.mark.parametrize("name", FAULTS)
def test_no_rank_takes_a_step_that_one_of_them_can_not_take(found: Path, name: str) -> None:
    for rank in load(found, name, SIZE):
        assert not rank["moved"]
        assert torch.equal(rank["disturbed"], rank["undisturbed"])


@pytest.mark.parametrize("name", ["closure_raises", *PLACES])
def test_an_exception_is_told_to_all_ranks(found: Path, name: str) -> None:
    *others, broken = load(found, name, SIZE)
    assert broken["said"].startswith("BrokenError")
    for rank in others:
        assert rank["said"].startswith(f"RankError: Rank {SIZE - 1} has failed")


def test_a_loss_that_is_not_finite_on_one_rank_refuses_the_step_on_all(found: Path) -> None:
    for rank in load(found, "one_is_not_finite", SIZE):
        assert not rank["said"]
        assert rank["refused"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("other_parameters", "start from different parameters"),
        ("other_network", "different networks"),
        ("other_place", "different places"),
    ],
)
def test_ranks_that_do_not_do_the_same_are_told(found: Path, name: str, message: str) -> None:
    for rank in load(found, name, SIZE):
        assert message in rank["said"]


def test_the_death_of_a_rank_is_told_to_the_others(tmp_path: Path) -> None:
    run(tmp_path, ["killed"], (SIZE,))
    for rank in load(tmp_path, "killed", SIZE, SIZE - 1):
        assert "has ended" in rank["said"]
        assert not rank["moved"]


def test_a_sum_that_one_rank_leaves_out_is_an_error_on_all(tmp_path: Path) -> None:
    run(tmp_path, ["other_sums"], (SIZE,))
    for rank in load(tmp_path, "other_sums", SIZE):
        assert "different places" in rank["said"]
        assert not rank["moved"]
