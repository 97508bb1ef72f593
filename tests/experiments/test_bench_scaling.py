"""`kronfac bench scaling`: memory in theory and in fact, the tables, a tiny real run."""

import json
import re
from dataclasses import asdict, replace

import pytest
import torch

from kronfac import KFAC, Categorical
from kronfac_experiments.bench import scaling
from kronfac_experiments.bench.chain import Sizes, cases, network
from kronfac_experiments.bench.peak_memory import NUMBER, available, measured, theory
from kronfac_experiments.bench.scaling_tables import Point, ScalingTrial, plots, tables
from kronfac_experiments.bench.trials import LeftOutError
from tests.experiments.runs import kronfac

SIZES = Sizes(width=6, depth=3, batch=50, outputs=4)


def bytes_of(value):
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    return sum(map(bytes_of, value)) if isinstance(value, list | tuple) else 0


@pytest.mark.parametrize("inverse", ["block_diagonal", "block_tridiagonal"])
def test_the_theory_is_what_the_state_holds(inverse):
    """A saved state is one set of factors, one inverse and δ₀."""
    kfac = KFAC(network(SIZES, 0), Categorical(), inverse=inverse)
    x, y = cases(SIZES, 0)
    kfac.step(kfac.closure(x, y))
    state = kfac.state_dict()["kfac"]
    expected = theory(SIZES, inverse == "block_tridiagonal")
    assert bytes_of(state["curvature"]) == expected.factors
    assert bytes_of(state["step"]["momentum"]) == expected.parameters / 5
    held = bytes_of(state["current"]["inverse"])
    if inverse == "block_diagonal":
        assert held == expected.inverses / 2
    else:  # columns of the correction may have been dropped
        assert held <= expected.inverses / 2
    assert expected.parameters == 5 * NUMBER * sum(p.numel() for p in kfac.model.parameters())
    assert expected.activations == 2 * NUMBER * 50 * (6 + 6 + 4)


def test_the_peak_of_a_process_of_its_own_is_at_least_the_theory():
    sizes = Sizes(width=400, depth=3, batch=20, outputs=10)
    peak = measured(sizes, "block_diagonal", "paper", threads=1, seed=0)
    expected = theory(sizes, tridiagonal=False)
    assert expected.kfac < peak < 5 * (expected.kfac + expected.activations)


def test_a_process_that_fails_is_left_out():
    with pytest.raises(LeftOutError, match=r"could not be measured: .*inverse"):
        measured(SIZES, "no inverse", "paper", threads=1, seed=0)


def test_some_memory_is_available():
    assert available() > 0


def trial_of(sizes):
    """Seconds ∝ width³ for K-FAC and width² for SGD, memory ∝ width²."""
    w = sizes.width
    return ScalingTrial(
        name=str(sizes),
        sizes=asdict(sizes),
        sgd_seconds=1e-6 * w**2,
        parts={"gradient": 5e-7 * w**3, "statistics": 5e-7 * w**3},
        ratios=[0.9 * w, 1.0 * w, 1.2 * w],
        sgd_operations=2.0 * w**1.5,
        operations={"gradient": 1.0 * w**2.5},
        peak_bytes=100 * w**2,
        theory={},
    )


def test_exponents_stand_below_the_sizes_and_what_was_left_out_says_why():
    points = []
    for width in (8, 16, 32, 4096):
        sizes = replace(SIZES, width=width)
        points.append(Point(width, sizes, theory(sizes, tridiagonal=False)))
    trials = {str(p.sizes): trial_of(p.sizes) for p in points[:3]}
    (table,) = tables({"width": points}, trials, {str(points[3].sizes): "needs about 3 GB"})
    *_, missing, fitted, counted = table.rows
    assert missing[:3] == ("4,096", "needs about 3 GB", "–")
    assert fitted[:4] == ("exponent", "2.00", "3.00", "1.00")
    assert fitted[5] == "2.00"
    assert (counted[1], counted[2], counted[4]) == ("1.50", "2.50", "1.00")
    assert table.rows[0][3] == "8.00 (7.20 – 9.60)"
    assert all(len(row) == len(table.columns) for row in table.rows)
    time, memory = plots({"width": points}, trials)
    assert list(time.lines[1].x) == [8, 16, 32]
    assert list(memory.lines[0].y) == pytest.approx([0.0064, 0.0256, 0.1024])


def test_a_tiny_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["bench", "scaling", "--threads", 1, "--seconds", 0, "--base", 6, 2, 20, 4]
    words += ["--widths", 6, 10**6, "--depths", 2, "--batches", 20, "--outputs", 4]
    assert kronfac(*words, "--output", "scaling.md") == 0
    out = capsys.readouterr().out
    assert "1 of 2: width 6, depth 2, batch 20, outputs 4" in out  # the base, for all four sweeps
    assert "2 of 2: width 1000000, depth 2" in out
    assert re.search(r"Left out: needs about [\d.]+ GB, [\d.]+ GB are free", out)
    folder = tmp_path / "runs/bench-scaling-block_diagonal-paper"
    (trial,) = json.loads((folder / "scaling.json").read_text())["trials"]
    assert len(trial["ratios"]) == 1  # no time for a second round
    assert {"inverse", "reduction_ratio", "direction"} <= set(trial["parts"])
    text = (tmp_path / "scaling.md").read_text()
    assert "By width" in text
    assert "T₃ = 20" in text
    page = (folder / "scaling.html").read_text()
    assert page.count("<svg") > 4
    assert kronfac(*words) == 0
    assert "1 of 2" not in capsys.readouterr().out


def test_quick_is_smaller_and_options_win():
    quick = scaling.ScalingConfig(quick=True, widths=(5,), seconds=2.0).plan
    assert quick.base == scaling.QUICK.base
    assert quick.sweeps["width"] == (5,)
    assert quick.sweeps["depth"] == scaling.QUICK.sweeps["depth"]
    assert quick.seconds == 2.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--widths 0", "--widths is 1 or more; got 0"),
        ("--batches -1 5", "--batches is 1 or more; got -1 5"),
        ("--base 1 2 0 4", "--base is 1 or more"),
        ("--seconds -1", "--seconds is 0 or more"),
        ("--inverse diagonal", "invalid choice 'diagonal'"),
    ],
)
def test_a_mistake_is_answered_in_one_line(words, message, capsys):
    assert kronfac("bench", "scaling", *words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
