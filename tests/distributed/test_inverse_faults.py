"""Inverses that several ranks have made: repairs, failures of one rank, saved states."""

from pathlib import Path

import pytest
import torch

from tests.distributed.inverse_faults import CASES, FAULTS, RESUMED, SIZE
from tests.distributed.test_equal_steps import TOLERANCE, load, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inverses")
    repaired = [name for name in CASES if name.startswith("repaired")]
    run(folder, repaired, (1,))
    return run(folder, CASES, (SIZE,))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_unit_without_an_inverse_gets_what_it_would_in_one_process(
    folder: Path, fault: str
) -> None:
    (one,) = load(folder, f"repaired-{fault}", 1)
    ranks = load(folder, f"repaired-{fault}", SIZE)
    theta, expected = ranks[0]["parameters"], one["parameters"]
    for rank in ranks:
        assert torch.equal(rank["parameters"], theta)
    assert float((theta - expected).norm() / expected.norm()) <= TOLERANCE
    assert one["events"] == ranks[0]["events"]
    assert one["events"]


@pytest.mark.parametrize("name", RESUMED)
def test_a_saved_state_goes_on_bit_for_bit(folder: Path, name: str) -> None:
    ranks = load(folder, f"resumed-{name}", SIZE)
    for rank in ranks:
        for theta in rank["found"].values():
            assert torch.equal(theta, ranks[0]["found"]["itself"])
        assert rank["saved"] == ranks[0]["saved"]


def test_one_rank_may_save_alone(folder: Path) -> None:
    found = load(folder, "one_saves", SIZE)
    assert [rank["saved"] for rank in found] == [6, None, None]
    for rank in found[1:]:
        assert torch.equal(rank["parameters"], found[0]["parameters"])
