"""Steps do not depend on the number of processes."""

from pathlib import Path

import pytest

from tests.distributed.everyday import CASES
from tests.distributed.test_equal_steps import check, run


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("worlds"), CASES, (1, 2))


@pytest.mark.parametrize("name", CASES)
def test_two_processes_take_the_steps_of_one(worlds: Path, name: str) -> None:
    check(worlds, name, (1, 2))
