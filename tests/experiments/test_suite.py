"""A suite runs each of its runs once, goes on where it was stopped, and refuses other settings."""

import math
from dataclasses import replace

import pytest
from rich.console import Console

from kronfac_experiments import suite
from kronfac_experiments.config import FirstOrderOptions, Limits, TrainConfig
from kronfac_experiments.run_directory import RunError
from kronfac_experiments.suite import Member, run_suite
from kronfac_experiments.train import TrainingInterruptedError
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
    for one, other in zip(first, again, strict=True):
        assert one.error.tolist() == other.error.tolist()
        assert one.end("iteration") == 12


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


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path):
    wild = tiny(
        tmp_path, "wild", optimizer="sgd", first_order=FirstOrderOptions(lr=1e30)
    )  # fmt: skip
    curves = run_suite([Member("", wild), Member("", tiny(tmp_path, "kfac"))], QUIET)
    assert curves[0].last == math.inf
    assert curves[1].end("iteration") == 12


def test_a_run_that_diverged_is_not_run_again(tmp_path, monkeypatch):
    wild = tiny(tmp_path, "wild", optimizer="sgd", first_order=FirstOrderOptions(lr=1e30))
    run_suite([Member("", wild)], QUIET)
    monkeypatch.setattr(suite, "train", None)
    assert run_suite([Member("", wild)], QUIET)[0].last == math.inf


def test_ctrl_c_says_how_to_go_on(tmp_path, monkeypatch):
    def interrupted(config, **_):
        raise TrainingInterruptedError("Continue with: kronfac train --resume …", 2)

    monkeypatch.setattr(suite, "train", interrupted)
    with pytest.raises(TrainingInterruptedError, match="the same command") as stop:
        run_suite([Member("", tiny(tmp_path, "run"))], QUIET)
    assert stop.value.exit_code == 130
