"""The demo with tiny settings: it races, writes the page, and its verdict follows from its numbers."""

from types import SimpleNamespace

import pytest

from kronfac_experiments import demo
from kronfac_experiments.race.problems import PROBLEMS
from kronfac_experiments.race.records import Records
from tests.experiments.runs import kronfac


def test_it_ends_in_a_page_and_makes_no_run_twice(tmp_path, capsys):
    config = demo.DemoConfig(seconds=0.1, threads=1, seed=3, output=tmp_path)
    page = demo.demo_command(config, PROBLEMS["iris"])
    records = Records(tmp_path / "small.jsonl")
    assert len(list(records)) == len(demo.CHOSEN)
    starts = set()
    for run in records:
        assert run.seed == 3
        assert run.rows[-1][2] >= 0.1
        assert run.rows[-1][3] < run.rows[0][3]
        starts.add(run.rows[0][3])
    assert len(starts) == 1, "all start from the same parameters"
    said = capsys.readouterr().out
    assert "Training error after equal time: K-FAC " in said
    text = page.read_text()
    assert all(f">{contestant.label}<" in text for contestant in demo.CHOSEN)
    before = records.path.read_bytes()
    assert demo.demo_command(config, PROBLEMS["iris"]) == page
    assert records.path.read_bytes() == before


@pytest.mark.parametrize("words", [("--seconds", "0"), ("--seed", "-1"), ("--threads", "0")])
def test_mistakes_are_answered_with_a_line(words, capsys):
    assert kronfac("demo", *words) == 2
    assert words[0] in capsys.readouterr().err


def lane(label, *errors, message=""):
    rows = [[10 * k, 0, float(k), error, 0, 0] for k, error in enumerate(errors)]
    run = SimpleNamespace(rows=rows, message=message, last=lambda column: rows[-1][column])
    problem = SimpleNamespace(judged_by="training")
    return SimpleNamespace(contestant=SimpleNamespace(label=label), problem=problem, runs=[run])


def test_the_verdict_says_who_won():
    one, other = lane("K-FAC", 8.0, 4.0, 1.0), lane("AdamW", 8.0, 5.0, 4.0)
    expected = (
        "K-FAC is 4.00 times lower than AdamW, whose final error it had passed after 1 of 2 seconds. It "
        "took 20 steps, AdamW 20."
    )
    assert demo.verdict([one, other]).endswith(expected)
    assert demo.verdict([other, one]).endswith(expected)


def test_the_verdict_does_not_take_a_failed_run_for_a_result():
    one, wild = lane("K-FAC", 8.0, 4.0), lane("AdamW", 8.0, 0.5, message="diverged")
    assert demo.verdict([one, wild]).endswith("K-FAC 4.00, AdamW failed. K-FAC alone did not fail.")
    assert demo.verdict([wild, lane("SOAP", 8.0, message="diverged")]).endswith("All failed.")
