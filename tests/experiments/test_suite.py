"""A suite runs each of its runs once, goes on where it was stopped, and refuses other settings."""

import math
from dataclasses import replace

import pytest
from rich.console import Console

from kronfac.experiments.config import Limits, TrainConfig
from kronfac.experiments.report.runs import Run
from kronfac.experiments.run_directory import RunError
from kronfac.experiments.suite import Member, error_at, evaluations, first_at, run_suite
from tests.experiments.runs import assert_same_run, write_cases

QUIET = Console(quiet=True)


def tiny(tmp_path, name, **changes):
    config = TrainConfig(
        data=write_cases(tmp_path), layers="16,8,3", threads=1, batch=40,
        limits=Limits(iterations=12), run_dir=tmp_path / name,
    )  # fmt: skip
    return replace(config, **changes)


def test_what_has_run_is_not_run_again(tmp_path):
    members = [
        Member("K-FAC", tiny(tmp_path, "kfac")),
        Member("AdamW", tiny(tmp_path, "adamw", optimizer="adamw")),
    ]
    first = run_suite(members, QUIET)
    stamp = (tmp_path / "kfac" / "metrics.jsonl").stat().st_mtime_ns
    again = run_suite(members, QUIET)
    assert (tmp_path / "kfac" / "metrics.jsonl").stat().st_mtime_ns == stamp
    assert [run.rows for run in again] == [run.rows for run in first]
    assert [len(run.rows) for run in first] == [13, 13]


def test_a_run_that_was_cut_short_goes_on_as_if_nothing_had_been(tmp_path):
    whole, part = tiny(tmp_path, "whole"), tiny(tmp_path, "part")
    run_suite([Member("", whole)], QUIET)
    run_suite([Member("", replace(part, limits=Limits(iterations=10)))], QUIET)
    run_suite([Member("", part)], QUIET)
    assert_same_run(tmp_path / "whole", tmp_path / "part")


def test_a_folder_with_another_run_is_refused(tmp_path):
    config = tiny(tmp_path, "run")
    run_suite([Member("", config)], QUIET)
    with pytest.raises(RunError, match="seed"):
        run_suite([Member("", replace(config, seed=1))], QUIET)


def run_of(*rows):
    named = [
        {"iteration": k, "cases": 10 * k, "seconds": s} | ({} if e is None else {"train_error": e})
        for k, s, e in rows
    ]
    return Run("run", {}, tuple(named), None, ())


def test_the_error_at_a_mark_is_the_last_one_evaluated_by_then():
    run = run_of((0, 0.0, 9.0), (1, 1.5, None), (2, 3.0, 4.0), (3, 4.5, 2.0))
    assert error_at(run, "seconds", 2.9) == 9.0
    assert error_at(run, "seconds", 3.0) == 4.0
    assert error_at(run, "cases", 30) == 2.0
    assert error_at(run, "seconds", 5.0) is None, "the run did not get there"


def test_the_averaged_error_counts_where_it_is_smaller():
    row = {"iteration": 1, "cases": 10, "seconds": 1.0}
    rows = (row | {"train_error": 3.0, "averaged_train_error": 2.0},)
    assert error_at(Run("run", {}, rows, None, ()), "iteration", 1) == 2.0


def test_an_error_that_is_not_finite_is_infinite():
    row = {"iteration": 1, "cases": 10, "seconds": 1.0, "train_error": None}
    assert [point.error for point in evaluations(Run("run", {}, (row,), None, ()))] == [math.inf]


def test_where_an_error_is_reached_is_interpolated_in_its_logarithm():
    run = run_of((0, 0.0, 16.0), (10, 1.0, 4.0), (20, 3.0, 1.0), (30, 4.0, 2.0))
    assert first_at(run, "iteration", 8.0) == pytest.approx(5.0)
    assert first_at(run, "seconds", 2.0) == pytest.approx(2.0)
    assert first_at(run, "cases", 4.0) == pytest.approx(100.0)
    assert first_at(run, "iteration", 0.5) is None


def test_after_an_error_that_is_not_finite_the_evaluation_itself_counts():
    run = run_of((0, 0.0, math.inf), (10, 1.0, 4.0))
    assert first_at(run, "iteration", 8.0) == 10
