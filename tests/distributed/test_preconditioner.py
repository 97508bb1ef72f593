"""The preconditioner in 1, 2 and 4 processes: the same gradients, and the same decisions."""

from pathlib import Path

import pytest
import torch

from tests.distributed.preconditioned import BROKEN, CASES, FAULTS
from tests.distributed.test_equal_steps import SIZES, check, run

QUICK = (
    "front",
    "front-late",
    "front-ddp",
    "front-unseen",
    "front-inputs-few",
    "front-inputs-words",
)
RANKS = 3


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("worlds"), QUICK)


@pytest.fixture(scope="module")
def rest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("worlds"), [name for name in CASES if name not in QUICK])


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("broken"), BROKEN, (RANKS,))


def check_states(folder: Path, name: str) -> None:
    """All ranks have the same state, to the bit."""
    for size in SIZES[1:]:
        files = [folder / f"{name}-{size}-{rank}.pt" for rank in range(size)]
        states = [torch.load(file, weights_only=True)["state"] for file in files]
        assert len(states[0])
        assert all(torch.equal(state, states[0]) for state in states[1:])


@pytest.mark.parametrize("name", QUICK)
def test_gradients_do_not_depend_on_the_number_of_processes(quick: Path, name: str) -> None:
    check(quick, name)
    check_states(quick, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in QUICK])
def test_gradients_do_not_depend_on_the_number_of_processes_at_length(
    rest: Path, name: str
) -> None:
    check(rest, name)
    check_states(rest, name)


@pytest.mark.parametrize("name", [fault.__name__ for fault in FAULTS])
def test_no_rank_replaces_gradients_if_one_of_them_can_not(broken: Path, name: str) -> None:
    files = [broken / f"front-{name}-{RANKS}-{rank}.pt" for rank in range(RANKS)]
    *others, failed = [torch.load(file, weights_only=True) for file in files]
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
    for rank in range(RANKS):
        found = torch.load(broken / f"front-other_steps-{RANKS}-{rank}.pt", weights_only=True)
        assert "different numbers of steps" in found["said"]
