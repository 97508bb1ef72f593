"""The demo with tiny settings: it trains, draws, and its verdict follows from its numbers."""

import pytest
from rich.console import Console

from kronfac.experiments import demo, problems


@pytest.fixture
def small(monkeypatch):
    problem = problems.Problem("curves", (784, 20, 6, 20, 784), "bernoulli", 1e-5, 300, 100)
    monkeypatch.setattr(problems, "CURVES", problem)
    return demo.Settings(seconds=0.3, batch=100, threads=1)


def test_all_three_train_for_the_same_time(small):
    curves = demo.run(small, Console(quiet=True))
    assert [curve.name.split(",")[0] for curve in curves] == ["K-FAC", "Adam", "Nesterov"]
    for curve in curves:
        assert curve.iterations > 0
        assert curve.seconds[0] == 0
        assert curve.seconds[-1] >= small.seconds
        assert curve.final < curve.errors[0]


def test_it_ends_in_a_picture_and_a_verdict(small, tmp_path, capsys):
    demo.main(demo.Settings(**vars(small) | {"output": tmp_path / "demo"}))
    assert (tmp_path / "demo" / "error_against_seconds.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "K-FAC ended at" in printed
    assert "error_against_seconds.png" in printed.replace("\n", "")


def curve(name, errors, iterations=10):
    return demo.Curve(name, [float(t) for t in range(len(errors))], errors, iterations, errors[-1])


def test_the_verdict_says_who_won():
    fast, slow = [8.0, 2.0, 1.0], [8.0, 5.0, 4.0]
    won = demo.verdict([curve("K-FAC", fast), curve("Adam", slow), curve("NAG", [8.0, 7.0, 6.0])])
    assert "4.0 times lower" in won[0]
    assert "after 1.0 of 2 seconds" in won[1]
    lost = demo.verdict([curve("K-FAC", slow), curve("Adam", fast), curve("NAG", slow)])
    assert "above Adam" in lost[0]
    assert len(lost) == 2
