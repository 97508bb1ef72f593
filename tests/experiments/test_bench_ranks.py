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
    assert {size: len(ranks) for size, ranks in found.items()} == {"1": 1, "2": 2}
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
    assert output.read_text().count("\n| 2 |") == 2


def test_at_least_one_process() -> None:
    with pytest.raises(ValueError, match="processes"):
        RanksConfig(processes=(0,))
