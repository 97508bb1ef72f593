"""Training in 1, 2 and 4 processes ends at the same parameters; real processes, gloo on loopback."""

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.cases import CASES

SIZES = (1, 2, 4)
QUICK_SIZES = (1, 3)
"""In `make test`; `make nightly` has all sizes."""
QUICK = (
    "first-few",
    "many-sampled",
    "words",
    "words-sampled",
    "convolutional",
    "accumulated",
    "ddp-clipped",
    "unseen-exact",
    "unseen-accumulated",
    "block_diagonal-sampled",
    "block_tridiagonal-sampled",
    "ekfac-sampled",
    "ddp-inner",
    "ddp-own",
    "lag",
    "front",
    "front-late",
    "front-ddp",
    "front-unseen",
    "front-words",
    "everyday",
    "everyday-whitened",
    "everyday-images",
)
TOLERANCE = 1e-10
"""‖θ − θ₁‖ / ‖θ₁‖ after twenty steps, θ₁ those of one process, in float64: what rounding comes to."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("worlds"), QUICK, QUICK_SIZES)


@pytest.fixture(scope="module")
def all_cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("worlds"), CASES)


def run(folder: Path, names: Iterable[str], sizes: Sequence[int] = SIZES) -> Path:
    """Run cases in worlds of these sizes."""
    listed = ",".join(map(str, sizes))
    command = [sys.executable, "-m", "tests.distributed.ranks", str(folder), listed, *names]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def load(folder: Path, name: str, size: int, ranks: int | None = None) -> list[dict[str, Any]]:
    """What the ranks of a world found, or its first ones."""
    files = [folder / f"{name}-{size}-{rank}.pt" for rank in range(ranks or size)]
    return [torch.load(file, weights_only=True) for file in files]


def check(folder: Path, name: str, sizes: Sequence[int] = SIZES) -> None:
    (one,) = load(folder, name, 1)
    for size in sizes[1:]:
        ranks = load(folder, name, size)
        for other in ranks[1:]:
            for part in {"parameters", "reports", "state"} & other.keys():
                assert torch.equal(other[part], ranks[0][part])
        theta, expected = ranks[0]["parameters"], one["parameters"]
        assert float((theta - expected).norm() / expected.norm()) <= TOLERANCE
        torch.testing.assert_close(ranks[0]["reports"], one["reports"], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("name", QUICK)
def test_steps_do_not_depend_on_the_number_of_processes(quick: Path, name: str) -> None:
    check(quick, name, QUICK_SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_do_not_depend_on_two_or_four_processes(all_cases: Path, name: str) -> None:
    check(all_cases, name)
