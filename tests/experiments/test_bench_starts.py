"""`kronfac bench starts`: tables from made-up runs, and one small real one."""

import json
import math
from dataclasses import replace

import pytest

from kronfac_experiments import cli
from kronfac_experiments.bench.starts_tables import StartTrial, tables


def trial(
    start: str, seed: int, cases: float | None, inverse: str = "block_diagonal"
) -> StartTrial:
    row = {"target": 4.0, "cases": cases, "iterations": 50, "seconds": 2.5, "batch": 500}
    return StartTrial(
        name=f"curves, {inverse}, {start}, seed {seed}",
        problem="curves",
        inverse=inverse,
        start=start,
        seed=seed,
        targets=[4.0],
        reached=[] if cases is None else [row],
    )


def test_the_table_has_medians_spread_and_the_ratio_of_the_extremes():
    trials = [trial("λ₀ 1", seed, 1000.0 * (seed + 1)) for seed in range(3)]
    trials += [trial("λ₀ 150", seed, 3000.0) for seed in range(3)]
    cases, runs = tables(trials)
    assert cases.heading == "Cases to training error 4 on curves"
    assert cases.columns == ["inverse", "λ₀ 1", "λ₀ 150", "most / fewest"]
    assert cases.rows == [
        ["block-diagonal", "2,000 (1,000 – 3,000)", "3,000 (3,000 – 3,000)", "1.50"]
    ]
    assert len(runs.rows) == 6


def test_what_was_not_reached_is_said():
    given_up = replace(trial("λ₀ 150", 0, None), cases=9500, error=4.25)
    trials = [trial("λ₀ 1", 0, 1000.0), given_up]
    (row,), runs = (table.rows for table in tables(trials))
    assert row == ["block-diagonal", "1,000", "–", "not reached"]
    assert runs[1][2:6] == ["–"] * 4
    assert [run[-1] for run in runs] == ["", "stood at 4.25 after 9,500 cases"]
    assert math.isinf(trials[1].to(4.0, "cases"))


def bench(*words: object) -> int:
    return cli.main(["bench", "starts", *map(str, words)])


def test_a_small_run_is_written_resumed_and_counts_its_trials(tmp_path, capsys):
    words = ("--problems", "curves", "--inverses", "block_diagonal", "--lambda0", 150, "--seeds", 1,
             "--targets", 60, "--most-cases", 9000, "--evaluation-cases", 200, "--threads", 1,
             "--run-dir", tmp_path, "--output", tmp_path / "starts.md")  # fmt: skip
    assert bench(*words) == 0
    content = json.loads((tmp_path / "starts.json").read_text())
    first, second = content["trials"]
    assert (first["start"], second["start"]) == ("no λ₀", "λ₀ 150")
    for one in (first, second):
        assert one["cases"] % 500 == 0
        assert one["first_lambda"] > 0
        (reached,) = one["reached"]
        # Mini-batches of 500, and the trial evaluations of the first of them.
        assert reached["cases"] > 500 * reached["iterations"]
    text = (tmp_path / "starts.md").read_text()
    assert "Cases to training error 60 on curves" in text
    assert "kronfac bench starts --threads 1" in text
    assert "--problems curves --inverses block_diagonal --lambda0 150" in text
    capsys.readouterr()
    assert bench(*words) == 0
    assert "1 of 2" not in capsys.readouterr().out, "nothing runs twice"
    assert json.loads((tmp_path / "starts.json").read_text()) == content


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--lambda0", -1), "--lambda0 and --targets are positive"),
        (("--seeds", 0), "--seeds is 1 or more; got 0"),
        (("--most-cases", 0), "--most-cases is 1 or more; got 0"),
    ],
)
def test_mistakes_get_one_line(words, line, capsys):
    assert bench(*words) == 2
    assert line in capsys.readouterr().err
