"""Progress and the exponent of the mini-batch size, on curves whose answers are known."""

import json
import math

import numpy as np
import pytest

from kronfac_experiments.error_curve import (
    ErrorCurve,
    batch_exponent,
    common_error,
    progress_ratio,
)


def falling(rate, m=100, iterations=400, every=10, plateau=0):
    """50 at first, and after the plateau 50 exp(−rate k); a second an iteration."""
    k = np.arange(0.0, iterations + 1, every)
    error = 50 * np.exp(-rate * np.maximum(k - plateau, 0))
    return ErrorCurve(iteration=k, cases=m * k, seconds=k, error=error)


def test_an_error_between_two_evaluations_is_interpolated():
    curve = falling(0.03)
    for k in (13.0, 200.0, 377.0):
        error = 50 * math.exp(-0.03 * k)
        assert curve.at("iteration", k) == pytest.approx(error)
        assert curve.reaches("iteration", error) == pytest.approx(k)
        assert curve.reaches("cases", error) == pytest.approx(100 * k)


def test_what_is_out_of_reach_is_none():
    curve = falling(0.01)
    assert curve.reaches("cases", 0.99 * curve.lowest) is None
    assert curve.at("iteration", 401) is None
    assert curve.reaches("iteration", 60.0) == 0, "begins below"


def test_an_error_counts_when_it_is_reached_first():
    bumpy = ErrorCurve(*(np.arange(4.0) for _ in range(3)), np.array([8.0, 2.0, 6.0, 1.0]))
    assert bumpy.reaches("iteration", 2.0) == 1


@pytest.mark.parametrize("axis", ["iteration", "cases", "seconds"])
def test_progress_is_the_ratio_of_the_rates(axis):
    fast, slow = falling(0.026), falling(0.02)
    last = common_error(fast, slow)
    assert last == slow.lowest
    assert progress_ratio(fast, slow, axis, last) == pytest.approx(1.3)
    assert progress_ratio(fast, slow, axis, last, 2 * last) == pytest.approx(1.3)
    assert progress_ratio(fast, slow, axis, 0.9 * last) is None, "the slower one is not there"
    assert progress_ratio(fast, slow, axis, 60.0) is None, "both begin below"


def test_a_common_plateau_counts_from_the_start_and_not_in_the_last_halving():
    fast, slow = falling(0.026, plateau=100), falling(0.02, plateau=100)
    last = common_error(fast, slow)
    assert 1 < progress_ratio(fast, slow, "iteration", last) < 1.25
    assert progress_ratio(fast, slow, "iteration", last, 2 * last) == pytest.approx(1.3)


@pytest.mark.parametrize("p", [0.0, 0.4, 1.0, 1.6])
def test_the_exponent_of_progress_in_proportion_to_a_power_of_m(p):
    small, large = falling(0.01, m=100), falling(0.01 * 3**p, m=300)
    last = common_error(small, large)
    for first in (math.inf, 2 * last):
        assert batch_exponent(large, small, 3.0, last, first) == pytest.approx(p)
        fewer_cases = progress_ratio(large, small, "cases", last, first)
        assert fewer_cases == pytest.approx(3 ** (p - 1))
    assert batch_exponent(large, small, 3.0, last / 2) is None


def test_of_a_run_the_smaller_finite_error_is_taken(tmp_path):
    errors = ((9.0,), (), (5.0, 4.0), (3.0, None), (None,))
    names = "train_error", "averaged_train_error"
    rows = [
        {"iteration": k, "cases": 5 * k, "seconds": k / 2} | dict(zip(names, of_row, strict=False))
        for k, of_row in enumerate(errors)
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    curve = ErrorCurve.read(tmp_path)
    assert curve.iteration.tolist() == [0, 2, 3]
    assert curve.cases.tolist() == [0, 10, 15]
    assert curve.seconds.tolist() == [0, 1.0, 1.5]
    assert curve.error.tolist() == [9.0, 4.0, 3.0]
    assert curve.last == 3.0
    (tmp_path / "diverged.json").touch()
    assert ErrorCurve.read(tmp_path).last == math.inf
