"""The demo with tiny settings: it trains, writes the page, and its verdict follows from its numbers."""

from dataclasses import replace

import pytest

from kronfac_experiments import demo
from kronfac_experiments.config import TrainConfig
from kronfac_experiments.report.runs import Run
from tests.experiments.runs import kronfac, rows, write_cases

NAMES = ("kfac", "nesterov", "adamw")


@pytest.fixture
def tiny(tmp_path):
    """Runs the demo on data of 16 numbers a case."""
    source = TrainConfig(data=write_cases(tmp_path), layers="16,8,3")
    config = demo.DemoConfig(seconds=0.3, batch=40, threads=1, output=tmp_path / "demo")
    return lambda: demo.demo_command(config, source)


def test_it_ends_in_a_page_and_a_verdict_of_three_lines(tiny, tmp_path, capsys):
    page = tiny()
    assert page == tmp_path / "demo" / "report.html"
    text = page.read_text()
    assert all(f">{name}<" in text for name in NAMES)
    for name in NAMES:
        run = rows(tmp_path / "demo" / name)
        assert run[-1]["seconds"] >= 0.3
        assert run[-1]["train_error"] < run[0]["train_error"]
        assert sum("train_error" in row for row in run) >= 2
    printed = capsys.readouterr().out.rstrip().splitlines()
    assert printed[-3].startswith("Training error after equal time: K-FAC ended at ")
    assert printed[-1].startswith("K-FAC took ")


def test_all_start_from_the_same_parameters(tiny, tmp_path):
    tiny()
    starts = {rows(tmp_path / "demo" / name)[0]["train_error"] for name in NAMES}
    assert len(starts) == 1


def test_an_earlier_demo_is_left_alone(tiny, tmp_path):
    first = tiny()
    before = first.read_bytes()
    assert tiny() == tmp_path / "demo-2" / "report.html"
    assert first.read_bytes() == before


@pytest.mark.parametrize("words", [("--seconds", "0"), ("--batch", "-1"), ("--threads", "0")])
def test_mistakes_are_answered_with_a_line(words, capsys):
    assert kronfac("demo", *words) == 2
    assert words[0] in capsys.readouterr().err


def run(*errors):
    names = ("iteration", "cases", "seconds", "train_error")
    points = [(10 * t, 5000 * t, float(t), e) for t, e in enumerate(errors)]
    return Run("", {}, tuple(dict(zip(names, p, strict=True)) for p in points))


LABELS = ["K-FAC", "Nesterov momentum", "AdamW"]


def test_the_verdict_says_who_won():
    won = demo.verdict(LABELS, [run(8.0, 4.0, 1.0), run(8.0, 7.0, 6.0), run(8.0, 5.0, 4.0)])
    assert won == [
        "Training error after equal time: K-FAC ended at 1.00, Nesterov momentum ended at 6.00, AdamW "
        "ended at 4.00.",
        "K-FAC is 4.0 times lower than AdamW, whose final error it had passed after 1 of 2 seconds.",
        "K-FAC took 20 steps, AdamW 20.",
    ]
    lost = demo.verdict(LABELS, [run(8.0, 5.0, 4.0), run(8.0, 7.0, 6.0), run(8.0, 2.0, 1.0)])
    assert lost[1].startswith("AdamW is ahead, by a factor of 4.0")
    assert len(lost) == 3


def test_the_verdict_does_not_take_a_diverged_run_for_a_result():
    wild = replace(run(8.0, 5.0, 0.5), diverged=True)
    said = demo.verdict(LABELS, [run(8.0, 4.0, 1.0), run(8.0, 7.0, 6.0), wild])
    assert "AdamW diverged" in said[0]
    assert said[1].startswith("K-FAC is 6.0 times lower than Nesterov momentum")
    assert "K-FAC alone" in demo.verdict(LABELS, [run(8.0, 4.0, 1.0), wild, wild])[1]
    assert (
        "Nesterov momentum is ahead, by a factor of inf"
        in demo.verdict(LABELS, [wild, run(8.0, 7.0, 6.0), wild])[1]
    )
