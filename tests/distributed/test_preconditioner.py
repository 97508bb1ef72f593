"""The preconditioner in 1, 2 and 4 processes: the same gradients, and the same decisions."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.distributed.preconditioned import BROKEN, CASES, FAULTS
from tests.distributed.test_equal_steps import QUICK_SIZES, SIZES, check, load, run

QUICK = (
    "front",
    "front-late",
    "front-ddp",
    "front-unseen",
    "front-words",
)
RANKS = 3


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("worlds"), QUICK, QUICK_SIZES)


@pytest.fixture(scope="module")
def all_cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("worlds"), CASES)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("broken"), BROKEN, (RANKS,))


def check_states(folder: Path, name: str, sizes: Sequence[int] = SIZES) -> None:
    """All ranks have the same state, to the bit."""
    for size in sizes[1:]:
        states = [rank["state"] for rank in load(folder, name, size)]
        assert len(states[0])
        assert all(torch.equal(state, states[0]) for state in states[1:])


@pytest.mark.parametrize("name", QUICK)
def test_gradients_do_not_depend_on_the_number_of_processes(quick: Path, name: str) -> None:
    check(quick, name, QUICK_SIZES)
    check_states(quick, name, QUICK_SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_gradients_do_not_depend_on_two_or_four_processes(all_cases: Path, name: str) -> None:
    check(all_cases, name)
    check_states(all_cases, name)


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
