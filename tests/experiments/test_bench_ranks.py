"""`kronfac bench ranks`: real processes, small."""

from pathlib import Path

import pytest
from rich.console import Console

from kronfac_experiments.bench import ranks
from kronfac_experiments.bench.ranks import RanksConfig, measure


@pytest.mark.slow
def test_two_processes_send_gradients_statistics_and_inverses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = RanksConfig(
        processes=(1, 2),
        widths=(200, 100, 10),
        batch=64,
        warm_up=3,
        steps=4,
        repeats=1,
        output=tmp_path / "page.md",
    )
    found = measure(config, Console(quiet=True))
    sizes = {size: len(runs) for size, runs in found.items()}
    assert sizes == {1: 1, 2: 2}
    parameters = 201 * 100 + 101 * 10
    statistics = sum(n * (n + 1) / 2 for n in (201, 100, 101, 10))
    # Gradient and statistics in every step; inverses as large as the statistics in a part of them.
    least = 4 * (parameters + statistics)
    (sent,) = found[2][0].travelled
    assert least < sent / 2 < 4 * least
    for run in found[2]:
        assert run.messages[0] > run.sums[0] >= 2
    assert found[1][0].messages == [0]
    monkeypatch.setattr(ranks, "measure", lambda config, console: found)
    ranks.ranks_command(config)
    assert "\n| 2 |" in (tmp_path / "page.md").read_text()


def test_at_least_one_process() -> None:
    with pytest.raises(ValueError, match="processes"):
        RanksConfig(processes=(0,))
