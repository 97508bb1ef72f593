"""`kronfac bench ranks`: real processes, small."""

import json
from pathlib import Path

import pytest

from kronfac_experiments.bench.ranks import RanksConfig, ranks_command


@pytest.mark.slow
def test_two_processes_send_what_the_plan_says(tmp_path: Path) -> None:
    output = tmp_path / "page.md"
    config = RanksConfig(
        processes=(1, 2),
        shares=(1.0, 0.5),
        widths=(200, 100, 10),
        batch=64,
        warm_up=3,
        steps=4,
        repeats=1,
        run_dir=tmp_path,
        output=output,
    )
    ranks_command(config)
    found = json.loads((tmp_path / "ranks.json").read_text())
    sizes = {size: len(ranks) for size, ranks in found.items()}
    assert sizes == {"1": 1, "2": 2, "2 in 2 groups": 2}
    parameters = 201 * 100 + 101 * 10
    statistics = sum(n * (n + 1) / 2 for n in (201, 100, 101, 10))
    # Gradient and statistics in every step; inverses as large as the statistics in a part of them.
    least = 4 * (parameters + statistics)
    (sent,) = found["2"][0]["travelled"]
    assert least < sent / 2 < 4 * least
    for run in found["2"]:
        assert run["messages"][0] > run["sums"][0] >= 2
        assert run["waited"][0] > 0
        assert run["under_way"][0] > 0
    assert found["1"][0]["messages"] == [0]
    # Inverses stay where they are made, and half of a direction goes each way in every step.
    (apart,) = found["2 in 2 groups"][0]["travelled"]
    assert least < apart / 2 < 4 * least
    held = [rank["inverses"] for rank in found["2 in 2 groups"]]
    assert sum(held) == found["2"][0]["inverses"] == found["1"][0]["inverses"]
    assert min(held) > 0
    assert "| 2 | 1/2 |" in output.read_text()
    assert "\n| 2 in 2 groups |" in output.read_text()


def test_at_least_one_process() -> None:
    with pytest.raises(ValueError, match="processes"):
        RanksConfig(processes=(0,))


@pytest.mark.parametrize("shares", [(), (0.0,), (1.5,)])
def test_shares_lie_between_0_and_1(shares: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="--shares"):
        RanksConfig(shares=shares)


def test_shares_that_make_the_same_groups_are_measured_once() -> None:
    worlds = RanksConfig(processes=(1, 2, 4), shares=(1.0, 0.5, 0.25)).worlds
    assert [(w.processes, w.groups) for w in worlds] == [
        (1, 1),
        (2, 1),
        (2, 2),
        (4, 1),
        (4, 2),
        (4, 4),
    ]
