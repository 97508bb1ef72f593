import json
import math
import platform
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import kronfac as library
from kronfac.extend import First
from kronfac_experiments import problems
from kronfac_experiments.config import (
    FirstOrderOptions,
    KfacOptions,
    Limits,
    TrainConfig,
    resolved,
)
from kronfac_experiments.evaluation import evaluation_due
from kronfac_experiments.optimizers import KfacStepper
from kronfac_experiments.run_directory import RunDirectory, read_config
from kronfac_experiments.task import load_task
from kronfac_experiments.training import ScheduledBatchSampler
from tests.conftest import mlp, normal
from tests.experiments.runs import checkpoint, kronfac, rows, train, write_cases

ALWAYS = {
    "iteration", "cases", "seconds", "batch", "loss", "lambda", "gamma", "rho", "alpha", "mu",
}  # fmt: skip


@pytest.fixture
def data(tmp_path):
    return write_cases(tmp_path)


@pytest.mark.parametrize(
    "words",
    [
        "--optimizer kfac",
        "--inverse block_tridiagonal --preset paper --batch paper --average 3",
        "--no-momentum --lambda0 3 --statistics-fraction 0.5 --fisher-fraction 0.25 --dtype float64",
        "--cg-steps 3",
        "--optimizer nag --lr 0.01 --mu-max 0.9 --average 5",
        "--optimizer AdamW --lr 0.01",
        "--optimizer sgd",
        "--optimizer lbfgs --lr 0.1",
    ],
    ids=lambda words: words.replace("--", ""),
)
def test_a_run_is_written_down(words, data, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(data, run, *words.split(), "--iterations", 12) == 0
    metrics = rows(run)
    assert [row["iteration"] for row in metrics] == list(range(13))
    kfac = "optimizer" not in words or "kfac" in words
    given = "--lambda0" in words
    for row in metrics:
        assert row.keys() >= ALWAYS
        assert ("train_error" in row) == (row["iteration"] in (0, 10, 12))
        assert ("test_error" in row) == (row["iteration"] in (0, 10, 12))
        # λ₀ is found in the first iteration, but with the paper's preset.
        known = kfac and (row["iteration"] > 0 or "paper" in words)
        assert (row["lambda"] is not None) == (row["gamma"] is not None) == (known or given)
        if row["iteration"]:
            assert math.isfinite(row["loss"])
            assert row["alpha"] is not None
            assert sum(row["parts"].values()) > 0
    averaged = [row["iteration"] for row in metrics if "averaged_train_error" in row]
    assert averaged == ([10, 12] if "--average" in words else [])
    for before, row in pairwise(metrics):
        assert row["seconds"] > before["seconds"]
        trials = row["cases"] - before["cases"] - row["batch"]
        assert trials % row["batch"] == 0
        # Trial evaluations for λ₀ are counted as cases, too.
        searched = kfac and "paper" not in words and row["iteration"] == 1
        assert (trials > 0) == searched
    assert metrics[-1]["train_error"] < metrics[0]["train_error"]
    out = capsys.readouterr().out
    assert f"Wrote {run}: config.json, metrics.jsonl, checkpoint.pt" in out


def test_the_reported_errors_are_those_of_the_saved_parameters(data, tmp_path):
    run = tmp_path / "run"
    assert train(data, run, "--optimizer", "nag", "--average", 4, "--iterations", 9) == 0
    task = load_task(TrainConfig(data=data, layers="16,8,3"))
    saved = checkpoint(run)
    model = task.make_model(1)
    last = rows(run)[-1]
    current = saved["model"]
    averaged = {
        name.removeprefix("module."): value
        for name, value in saved["average"].items()
        if name != "n_averaged"
    }
    assert int(saved["average"]["n_averaged"]) == 6
    for prefix, parameters in (("", current), ("averaged_", averaged)):
        model.load_state_dict(parameters)
        for name, cases in (("train", task.train), ("test", task.test)):
            x = cases.inputs
            error = (model(x).sigmoid() - x).square().sum(dim=1).mean().item()
            assert_close(last[f"{prefix}{name}_error"], error, rtol=1e-5, atol=0)


def test_the_steps_are_those_of_the_library(data, tmp_path):
    run = tmp_path / "run"
    words = ("--preset", "paper", "--inverse", "block_tridiagonal", "--fisher-fraction", 0.5)
    assert train(data, run, *words, "--seed", 3, "--average", 0, "--iterations", 7) == 0
    task = load_task(TrainConfig(data=data, layers="16,8,3"))
    model, paper = task.make_model(3), library.presets.paper()
    optimizer = library.KFAC(
        model,
        library.Bernoulli(),
        inverse="block_tridiagonal",
        weight_decay=1e-5,
        fisher=library.extend.SampledFisher(seed=3),
        **paper | {"intervals": replace(paper["intervals"], fisher_fraction=First(0.5))},
    )
    sampler = ScheduledBatchSampler(len(task.train), 40, seed=3)
    for row in rows(run)[1:]:
        x = task.train.inputs[sampler.next_indices()]
        optimizer.step(optimizer.closure(x, x))
        report = optimizer.report
        names = ("loss", "gamma", "alpha", "mu", "rho")
        assert row["lambda"] == report.lambda_
        assert [row[name] for name in names] == [getattr(report, name) for name in names]
    for name, value in checkpoint(run)["model"].items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize("name", ["sgd", "lbfgs"])
def test_weight_decay_is_part_of_the_objective(name, data, tmp_path):
    """With and without a `weight_decay` of its own, the first step follows ∇h + ηθ."""
    run = tmp_path / "run"
    words = ("--optimizer", name, "--lr", 1e-3, "--weight-decay", 0.5, "--iterations", 1)
    assert train(data, run, *words, "--dtype", "float64") == 0
    task = load_task(TrainConfig(data=data, layers="16,8,3")).to(torch.device("cpu"), torch.float64)
    model = task.make_model(0).double()
    sampler = ScheduledBatchSampler(len(task.train), 40, seed=0)
    x = task.train.inputs[sampler.next_indices()]
    if name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    else:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1e-3)

    def closure():
        optimizer.zero_grad()
        decay = sum(p.square().sum() for p in model.parameters())
        loss = library.Bernoulli()(model(x), x) + 0.25 * decay
        loss.backward()
        return loss

    optimizer.step(closure)
    for key, value in checkpoint(run)["model"].items():
        assert_close(value, model.state_dict()[key], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("shift", "loss"), [(0.0, "Bernoulli"), (0.5, "Gaussian")])
def test_the_range_of_the_data_chooses_the_loss(shift, loss, tmp_path, capsys):
    cases = np.random.default_rng(0).random((60, 16)) + shift
    path = write_cases(tmp_path, anything=cases)
    assert train(path, tmp_path / "run", "--iterations", 1) == 0
    assert f"{loss} loss, 50 training and 10 test cases" in capsys.readouterr().out


def test_own_test_cases_are_used(tmp_path):
    random = np.random.default_rng(0)
    path = write_cases(tmp_path, test=random.random((5, 16)), cases=random.random((60, 16)))
    task = load_task(TrainConfig(data=path, layers="16,4"))
    with np.load(path) as arrays:
        assert_close(task.test.inputs, torch.from_numpy(arrays["test"]).float())
        assert_close(task.train.inputs, torch.from_numpy(arrays["cases"]).float())


def test_stops_at_the_error_or_the_time(data, tmp_path, capsys):
    first = tmp_path / "error"
    assert train(data, first, "--iterations", 500, "--until-error", 0.5) == 0
    metrics = rows(first)
    assert metrics[-1]["train_error"] <= 0.5
    assert metrics[-1]["iteration"] % 10 == 0
    assert metrics[-1]["iteration"] < 500
    assert "Stopped after reaching an error of" in capsys.readouterr().out
    second = tmp_path / "time"
    assert train(data, second, "--seconds", 0.05) == 0
    metrics = rows(second)
    assert metrics[-1]["seconds"] >= 0.05 > metrics[-2]["seconds"]
    assert "train_error" in metrics[-1]


def test_a_run_that_diverges_says_so_and_fails(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", "--optimizer", "sgd", "--lr", 1e30) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the run diverged; a smaller --lr may help" in line


def test_an_optimizer_that_cannot_be_used_fails_while_running(data, tmp_path, capsys):
    assert train(data, tmp_path / "run", "--optimizer", "sparseadam") == 1
    assert "Iteration 1: RuntimeError" in capsys.readouterr().err


def test_the_configuration_is_written_whole(data, tmp_path):
    run = tmp_path / "run"
    assert train(data, run, "--iterations", 1, "--seed", 5, "--preset", "paper") == 0
    written = json.loads((run / "config.json").read_text())
    options = written["config"]
    expected = {"optimizer": "kfac", "batch": 40, "average": 200, "seed": 5, "weight_decay": 1e-5}
    assert {name: options[name] for name in expected} == expected
    assert options["kfac"] == {
        "inverse": "block_diagonal", "preset": "paper", "lambda0": 150.0, "momentum": True, "cg_steps": 1,
        "statistics_fraction": 1 / 8, "fisher_fraction": 1 / 4,
    }  # fmt: skip
    assert options["limits"] == {"iterations": 1, "seconds": None, "until_error": None}
    assert (options["run_dir"], written["name"]) == (None, "cases")
    versions = written["versions"]
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == torch.__version__
    assert versions["kronfac"] == library.__version__
    assert written["machine"]["processors"] >= 1


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig("mnist"),
        TrainConfig("curves", optimizer="nag"),
        TrainConfig("faces", kfac=KfacOptions(preset="paper", momentum=False)),
        TrainConfig("mnist16", optimizer="RMSprop", first_order=FirstOrderOptions(lr=0.1)),
        TrainConfig("mnist", batch="paper", limits=Limits(until_error=1.0)),
    ],
)
def test_configurations_survive_json_and_resolving_twice(config, tmp_path):
    once = resolved(config, cases=20_000, weight_decay=1e-5)
    assert resolved(once, cases=20_000, weight_decay=1e-5) == once
    with RunDirectory(tmp_path, once, None) as directory:
        directory.start(None)
    assert read_config(tmp_path) == once


def test_defaults_are_the_papers():
    def of(name, **options):
        return resolved(TrainConfig(name, **options), cases=60_000, weight_decay=1e-5)

    paper = KfacOptions(preset="paper")
    assert [of(name, optimizer="nag").batch for name in ("curves", "mnist", "faces")] == [
        250, 500, 500,
    ]  # fmt: skip
    assert of("mnist", optimizer="nag").average == of("mnist", kfac=paper).average == 200
    assert of("mnist", kfac=paper).batch == "paper"
    assert (of("mnist").batch, of("mnist").average) == ("adaptive", 0)
    assert of("mnist", optimizer="adamw").batch == 500


def test_evaluations_are_as_dense_as_promised():
    due = [k for k in range(1, 301) if evaluation_due(k, 50, until_error=False)]
    assert due == [*range(10, 101, 10), 150, 200, 250, 300]
    assert not any(evaluation_due(k, 0, until_error=False) for k in range(1, 301))
    due = [k for k in range(100, 141) if evaluation_due(k, 50, until_error=True)]
    assert due == [100, 110, 120, 130, 140]


def test_curves_is_the_default_that_needs_no_download(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    # The real network; fewer cases, as drawing all 30,000 takes longer than the rest.
    small = problems.curves(1200)
    monkeypatch.setattr(problems, "load", lambda name: (small[:1000], small[1000:]))
    words = ("--iterations", 2, "--batch", 100, "--threads", 1)
    assert kronfac("train", "curves", *words) == 0
    assert "784-400-200-100-50-25-6-25-" in capsys.readouterr().out
    metrics = rows(tmp_path / "runs" / "curves-kfac-seed0")
    assert metrics[-1]["train_error"] < metrics[0]["train_error"]


def test_the_classifier_counts_mistakes(real_data, tmp_path):
    words = ("--iterations", 3, "--threads", 1, "--batch", 500, "--evaluation-cases", 2000)
    run = tmp_path / "run"
    assert kronfac("train", "mnist16", *words, "--run-dir", run) == 0
    metrics = rows(run)
    model = problems.classifier_model(0)
    model.load_state_dict(checkpoint(run)["model"])
    task = load_task(TrainConfig("mnist16"))
    test = task.test.select(slice(2000))
    right = (model(test.inputs).argmax(dim=1) == test.targets).double().mean()
    assert_close(metrics[-1]["test_error"], 100 * (1 - right.item()))
    assert metrics[-1]["test_error"] < metrics[0]["test_error"]


def test_a_mini_batch_that_is_gone_through_again_after_a_step_was_taken_back_counts_twice():
    model, x, y = mlp([4, 6, 3], seed=3), normal(80, 4), normal(80, 3, seed=1)
    optimizer = library.KFAC(model, library.Gaussian())
    stepper = KfacStepper(optimizer)
    assert stepper.step(x, y).trials > 0, "to find the first λ"
    sensible = optimizer.settings
    optimizer.settings = replace(sensible, step_rule=library.RawStep(30.0))
    assert stepper.step(x, y).trials == 0
    optimizer.settings = sensible
    assert stepper.step(x, y).trials == 1
