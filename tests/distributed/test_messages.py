"""A step has one message for each thing that depends on the one before it, and no more."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.messages import CASES
from tests.distributed.test_equal_steps import load, run

SIZE = 2
FIRST = 25
"""The first step that is looked at: before, λ is found, and every step has an inverse of its own."""
ORDINARY = {
    "evaluation": 1,
    "gradient": 1,
    "examples": 1,
    "statistics": 2,
    "fisher": 1,
    "commit": 1,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("messages"), list(CASES), (SIZE,))


def steps(folder: Path, name: str) -> list[dict[str, Any]]:
    """The later steps, without those that refresh the inverse."""
    ranks = load(folder, name, SIZE)
    assert ranks[0]["steps"] == ranks[1]["steps"]
    later = ranks[0]["steps"][FIRST:]
    return [step for step in later if "refresh" not in step["messages"]]


@pytest.mark.parametrize("name", ["told", "told-deep"])
def test_an_ordinary_step_has_seven_messages_and_two_sums(found: Path, name: str) -> None:
    ordinary = 0
    for step in steps(found, name):
        expected = dict(ORDINARY)
        if losses := step["validated"] + step["measured"]:
            expected["loss"] = losses
        ordinary += not losses
        assert step["messages"] == expected
        assert step["sums"] == 2
    assert ordinary


def test_ranks_that_draw_for_themselves_tell_how_many_examples_they_have(found: Path) -> None:
    for step in steps(found, "told-normalized"):
        assert step["messages"]["examples"] == 1
