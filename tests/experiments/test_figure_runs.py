"""Figures 9, 10 and 11, with tiny networks and few iterations."""

from dataclasses import replace

import pytest

from kronfac_experiments.config import Limits, resolved
from kronfac_experiments.figures import (
    FigureConfig,
    figure_9,
    files,
    methods,
    second_experiment,
)
from kronfac_experiments.run_directory import read_config
from kronfac_experiments.session import Session
from kronfac_experiments.train import TrainingInterruptedError
from tests.experiments.figures import Made, figure, table
from tests.experiments.runs import tiny_problems

FIRST = figure_9.Setting(
    lambda0=1.0,
    sizes=(figure_9.Size(10, 20, 40), figure_9.Size(20, 20, 30)),
    evaluate_baseline_every=10,
    evaluation_cases=30,
    errors=(2.0, 1e-9),
)
REAL = second_experiment.QUICK + second_experiment.FULL
SECOND = tuple(
    second_experiment.Setting(name, 1.0, Limits(iterations=12), Limits(iterations=22), 10, 30)
    for name in ("curves", "faces")
)
SECOND_STEPS = 2 * (2 * 12 + 2 * 22)


@pytest.fixture(autouse=True, scope="module")
def small():
    with pytest.MonkeyPatch.context() as patch:
        tiny_problems(patch, "curves", "mnist", "faces")
        patch.setattr(figure_9, "QUICK", FIRST)
        patch.setattr(figure_9, "FULL", replace(FIRST, evaluation_cases=None))
        patch.setattr(second_experiment, "QUICK", SECOND)
        patch.setattr(second_experiment, "NO_MOMENTUM_BATCH", 20)
        patch.setattr(files, "DPI", 30)
        yield


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return Made(tmp_path_factory.mktemp("made"))


@pytest.fixture
def steps(monkeypatch):
    """A list that grows by one at every step; Ctrl-C comes at the step of number `stop`."""
    step = Session.step

    class Steps(list):
        stop = None

    taken = Steps()

    def counted(self):
        if len(taken) == taken.stop:
            raise KeyboardInterrupt
        taken.append(1)
        return step(self)

    monkeypatch.setattr(Session, "step", counted)
    return taken


@pytest.mark.parametrize("number", [9, 10, 11])
def test_writes_figure_numbers_and_curves_and_says_so(number, made):
    paths, said = made(number)
    ends = (".png", ".pdf", ".csv", "_curves.csv")
    assert paths == [made.folder / f"figure_{number}{end}" for end in ends]
    assert paths[0].read_bytes().startswith(b"\x89PNG")
    assert paths[1].read_bytes().startswith(b"%PDF")
    assert f"Figure {number}" in said
    assert said.rstrip().endswith("\n".join(f"wrote {path}" for path in paths))
    assert {row["method"] for row in table(paths[3])} == {m.name for m in methods.METHODS}


def test_figure_9_counts_cases_and_says_what_is_not_reached(made):
    paths, said = made(9)
    values = made.values(9)
    assert len([name for name in values if name.startswith("p, ")]) == 4 * 2
    for method in methods.METHODS:
        for m in (10, 20):
            assert 0 <= values[f"cases to error 2, {method.name}, m = {m}"] <= 40 * m
            assert values[f"cases to error 1e-09, {method.name}, m = {m}"] is None
    assert said.count("not reached") >= 4 * 2
    points = table(paths[3])
    assert all(int(p["cases"]) == int(p["m"]) * int(p["iteration"]) for p in points)
    last = [p["iteration"] for p in points if p["method"].startswith("baseline") and p["m"] == "20"]
    assert last[-1] == "30"


def test_figure_11_is_made_of_the_runs_of_figure_10(tmp_path, steps):
    first, _ = figure(10, tmp_path)
    assert len(steps) == SECOND_STEPS
    second, _ = figure(11, tmp_path)
    assert len(steps) == SECOND_STEPS, "nothing is trained again"
    assert first[3].read_text() == second[3].read_text()


def test_figures_10_and_11_have_the_errors_at_equal_marks(made):
    curves, values = table(made(11)[0][3]), made.values(11)
    for method in methods.METHODS:
        for k in (3, 6, 12):  # of the 12 iterations of the shortest run
            assert values[f"FACES: error at iteration {k}, {method.name}"] > 0
    evaluated = next(
        p["error"]
        for p in curves
        if (p["problem"], p["method"], p["iteration"]) == ("faces", methods.DIAGONAL.name, "12")
    )
    at_12 = values[f"FACES: error at iteration 12, {methods.DIAGONAL.name}"]
    assert at_12 == pytest.approx(float(evaluated))
    assert len([name for name in values if "paper: typically 1.25 to 1.4" in name]) == len(SECOND)
    seconds = [row["quantity"] for row in made.rows(10)]
    ends = f" seconds, {methods.BASELINE.name}"
    assert len([name for name in seconds if name.endswith(ends)]) == 6


def test_an_interrupted_figure_goes_on(tmp_path, steps):
    steps.stop = 20  # in the second run, before it is saved
    with pytest.raises(TrainingInterruptedError):
        figure(10, tmp_path)
    finished = next(tmp_path.glob("runs/*/curves-tridiagonal-*/metrics.jsonl"))
    written = finished.stat().st_mtime_ns
    assert not (tmp_path / "figures").exists()
    steps.stop = None
    figure(10, tmp_path)
    assert finished.stat().st_mtime_ns == written
    assert len(steps) == SECOND_STEPS + 20 - 12


def test_another_seed_or_measure_or_constant_is_another_run(tmp_path, steps, monkeypatch):
    config = FigureConfig(number=10, quick=True, runs=tmp_path, threads=1)
    for changes in ({}, {"seed": 1}, {"cases": 25}):
        second_experiment.run(replace(config, **changes))
    assert len(steps) == 3 * SECOND_STEPS
    monkeypatch.setitem(methods.TUNED, "faces", (0.02, 0.9))
    results = second_experiment.run(config)
    assert len(steps) == 3 * SECOND_STEPS + 22, "the baseline on FACES alone"
    assert results[1].title == "FACES: λ₀ = 1; baseline with learning rate 0.02, μ_max = 0.9"


def test_errors_are_measured_on_the_cases_asked_for(tmp_path):
    _, said = figure(9, tmp_path, quick=False, cases=25)
    assert "error on the first 25 training cases" in said
    saved = next(tmp_path.glob("runs/experiment-1-full-cases25-*/mnist-diagonal-m10-*"))
    assert read_config(saved).recording.evaluation_cases == 25


@pytest.mark.parametrize("setting", REAL, ids=lambda s: f"{s.problem}-{s.lambda0:g}")
def test_the_real_settings_are_the_papers_methods(setting):
    config = FigureConfig(number=10)
    runs = {
        method: second_experiment._measured(config, setting, method).member(config, "").config
        for method in methods.METHODS
    }
    assert {run.problem for run in runs.values()} == {setting.problem}
    kfac = [run for run in runs.values() if run.optimizer == "kfac"]
    assert [run.kfac.preset for run in kfac] == ["paper"] * 3
    assert {run.kfac.lambda0 for run in kfac} == {setting.lambda0}
    assert [run.kfac.momentum for run in kfac] == [True, True, False]
    assert [run.batch for run in runs.values()] == [
        "paper",
        "paper",
        20,
        None,
    ]  # 20: as the tests have it
    baseline = resolved(runs[methods.BASELINE], cases=20_000, weight_decay=0.0)
    assert baseline.batch == (250 if setting.problem == "curves" else 500)
