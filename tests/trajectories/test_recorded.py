"""Seeded runs are as recorded, to 1e-8: see `runs.py`."""

import json

import pytest

from tests.trajectories.runs import PROBLEMS, RECORDED, RUNS, available, run

EXPECTED = json.loads(RECORDED.read_text())


def _case(key: tuple[str, str, str]):
    marks = [pytest.mark.slow] if PROBLEMS[key[0]].slow else []
    return pytest.param(*key, id="/".join(key), marks=marks)


@pytest.mark.parametrize(("problem", "inverse", "rules"), [_case(key) for key in RUNS])
def test_a_run_ends_at_the_recorded_parameters(problem, inverse, rules):
    if not available(problem):
        pytest.skip("needs real data: set KRONFAC_DATA to a folder with it")
    expected, found = EXPECTED["/".join((problem, inverse, rules))], run(problem, inverse, rules)
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-8, abs=1e-12)
    assert found["parameters"].keys() == expected["parameters"].keys()
    for name, numbers in expected["parameters"].items():
        assert found["parameters"][name] == pytest.approx(numbers, rel=1e-8, abs=1e-8 * numbers[0])
