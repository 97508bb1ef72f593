"""`kronfac bench authors-run` on small data."""

import json
from dataclasses import replace

import pytest
import torch

import kronfac as library
from kronfac.extend import First
from kronfac_experiments import problems, task
from kronfac_experiments.bench import authors_run
from kronfac_experiments.bench.authors_run import AuthorsRunConfig, AuthorsTrial
from kronfac_experiments.training import ExponentialBatchSize, ScheduledBatchSampler
from tests.experiments.runs import kronfac

PROBLEM = problems.Problem("mnist", (16, 8, 3, 8, 16), "bernoulli", 1e-5, 60, 20)


@pytest.fixture
def tiny_mnist(monkeypatch):
    """An autoencoder of 60 cases in the place of MNIST's."""
    cases = torch.rand(80, 16, generator=torch.Generator().manual_seed(0))
    tiny = task.autoencoder_task(PROBLEM, cases[:60], cases[60:])
    monkeypatch.setattr(authors_run, "_load", lambda: tiny)
    return tiny


def authors_rows(seed: int, last: float) -> list[dict[str, float]]:
    """As logged by the authors, with an error of `last` at iteration 50 and γ fallen at 40 and 60."""
    gamma = {20: 12.247, 40: 1.0, 60: 0.599}
    return [
        {"k": k, "m": 1000 + k, "cases": 1000 * k, "lambda": 150.0, "seconds": 2.0 * k,
         "gamma": gamma[max((g for g in gamma if g <= k), default=20)], "train_error": last}
        for k in range(1, 61)
    ]  # fmt: skip


def test_errors_are_set_beside_the_authors():
    trials = [
        AuthorsTrial(f"seed {s}", s, 0.25, authors_rows(s, 49.08 * f))
        for s, f in enumerate((1.0, 2.0, 3.0))
    ]
    errors, gammas = authors_run.tables(AuthorsRunConfig(fractions=(0.25,), iterations=60), trials)
    assert errors.columns == ["τ₂", "iteration 50", "seconds"]
    assert errors.rows == [
        ["authors' log (1)", "49.08", "–"],
        ["0.25", "98.2 (49.1 – 147), 2.00", "120"],
    ]
    assert "Cases processed by the end: 60,000 (the log: 504,877" in errors.note
    assert gammas.rows[0] == ["seed 0", "12.247", "40", "40", "0.599"]


def test_the_authors_run_is_the_papers_preset_and_none_is_run_twice(tiny_mnist, tmp_path, capsys):
    words = ("bench", "authors-run", "--seeds", 2, "--fractions", 0.5, "--iterations", 5, "--threads", 1,
             "--rows", tmp_path / "rows.jsonl", "--output", tmp_path / "authors.md")  # fmt: skip
    assert kronfac(*words) == 0
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["seed"], row["k"]) for row in rows] == [
        (s, k) for s in (0, 1) for k in range(1, 6)
    ]
    x = tiny_mnist.train.inputs
    model, paper = tiny_mnist.make_model(1), library.presets.paper()
    optimizer = library.KFAC(
        model,
        library.Bernoulli(),
        inverse="block_tridiagonal",
        weight_decay=1e-5,
        fisher=library.extend.SampledFisher(seed=1),
        **paper | {"intervals": replace(paper["intervals"], fisher_fraction=First(0.5))},
    )
    sizes = ExponentialBatchSize(60, 60, 500)
    sampler = ScheduledBatchSampler(60, sizes, seed=1)
    for row in rows[5:]:
        batch = x[sampler.next_indices()]
        optimizer.step(optimizer.closure(batch, batch, chunk=5000))
        report = optimizer.report
        assert (row["m"], row["loss"], row["lambda"], row["gamma"], row["alpha"], row["mu"]) == (
            60, report.loss, report.lambda_, report.gamma, report.alpha, report.mu,
        )  # fmt: skip
    text = (tmp_path / "authors.md").read_text()
    assert "Made by `kronfac bench authors-run --threads 1 --seeds 2" in text
    capsys.readouterr()
    before = (tmp_path / "rows.jsonl").read_bytes()
    assert kronfac(*words) == 0
    assert "seed 0, τ₂ = 0.5\n" not in capsys.readouterr().out
    assert (tmp_path / "rows.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("authors-run --fractions 2", "--fractions are in (0, 1]"),
        ("authors-run --iterations 0", "--iterations is 1 or more; got 0"),
    ],
)
def test_mistakes_get_one_line(words, line, capsys):
    assert kronfac("bench", *words.split()) == 2
    assert line in capsys.readouterr().err
