"""Fixtures of all tests of the experiments."""

import os
from pathlib import Path

import pytest

from kronfac_experiments.data.mnist import TRAIN_IMAGES

BESIDE_THE_CLONE = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture
def real_data(monkeypatch):
    """The folder that holds MNIST; the test is skipped without one."""
    folder = Path(os.environ.get("KRONFAC_DATA", BESIDE_THE_CLONE))
    if not (folder / TRAIN_IMAGES.path).is_file():
        pytest.skip(f"needs real data: set KRONFAC_DATA to a folder with {TRAIN_IMAGES.path}")
    monkeypatch.setenv("KRONFAC_DATA", str(folder))
    return folder
