"""A run that 2 processes saved through torch.distributed.checkpoint goes on in 1 and in 4, and in 2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kronfac import KFAC
from kronfac.distributed import WholeState
from kronfac.errors import StateError
from tests.conftest import mlp
from tests.distributed.cases import regression
from tests.distributed.checkpoints import CASES, FOLDER


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worlds")
    command = [sys.executable, "-m", "tests.distributed.ranks", str(folder), "2,1,4", *CASES]
    environment = os.environ | {FOLDER: str(folder)}
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=900, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [1, 4])
def test_a_saved_run_goes_on_in_another_number_of_processes(
    folder: Path, name: str, size: int
) -> None:
    expected = torch.load(folder / f"{name}-2-0.pt", weights_only=True)["parameters"]
    for rank in range(size):
        theta = torch.load(folder / f"{name}-{size}-{rank}.pt", weights_only=True)["parameters"]
        assert float((theta - expected).norm() / expected.norm()) <= 1e-10


def optimizer() -> KFAC:
    return KFAC(mlp([5, 4, 3]).double(), nn.MSELoss())


def test_the_whole_state_comes_back_bit_for_bit() -> None:
    one, other = optimizer(), optimizer()
    for k in range(3):
        one.step(one.closure(*regression(k, 12)))
    other.model.load_state_dict(one.model.state_dict())
    WholeState(other).load_state_dict(WholeState(one).state_dict())
    for k in range(3, 6):
        losses = [o.step(o.closure(*regression(k, 12))) for o in (one, other)]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("wrong", [{}, {"whole": 3}, {"whole": b"nothing"}, None])
def test_what_is_no_whole_state_is_refused(wrong: object) -> None:
    with pytest.raises(StateError, match="WholeState"):
        WholeState(optimizer()).load_state_dict(wrong)  # type: ignore[arg-type]
