"""The authors' logged run of the MNIST autoencoder: its first 30 iterations, and the command beside it.

The long comparison is `kronfac bench authors-run`; its output is in docs/results/paper_figures.md.
"""

import json

import pytest
import torch

import kronfac as library
from kronfac_experiments import problems, task
from kronfac_experiments.bench import authors_run
from kronfac_experiments.bench.authors_run import AuthorsRunConfig, AuthorsTrial
from kronfac_experiments.training import ExponentialBatchSize, ScheduledBatchSampler
from tests.experiments.runs import kronfac

PROBLEM = problems.Problem("mnist", (16, 8, 3, 8, 16), "bernoulli", 1e-5, 60, 20)

# The objective on the mini-batch before the step, and the mini-batch's size, in the authors' log.
OBJECTIVE = {1: 870.30, 5: 376.16, 10: 261.07, 20: 223.80, 30: 209.81}
BATCH = {1: 1000, 2: 1008, 3: 1016, 4: 1024, 10: 1076, 20: 1168, 30: 1268}


def test_the_first_thirty_iterations(real_data):
    problem, train = problems.MNIST, problems.load("mnist")[0]
    model = problems.build_model(problem, seed=0)
    optimizer = library.KFAC(
        model,
        library.Bernoulli(),
        inverse="block_tridiagonal",
        weight_decay=problem.weight_decay,
        **library.presets.paper(),
    )
    sizes = ExponentialBatchSize(1000, len(train), 500)
    sampler = ScheduledBatchSampler(len(train), sizes, seed=0)
    for k in range(1, 31):
        with torch.no_grad():
            decay = sum(p.square().sum() for p in model.parameters()) * problem.weight_decay / 2
        x = train[sampler.next_indices()]
        optimizer.step(optimizer.closure(x, x))
        report = optimizer.report
        assert not report.events
        assert report.examples == BATCH.get(k, report.examples)
        # λ falls at every check, as every ρ is above 3/4; γ stays where it starts.
        assert report.lambda_ == pytest.approx(150 * 0.95 ** (k - k % 5), rel=1e-12)
        assert report.gamma == pytest.approx(12.2474, abs=1e-4)
        assert (report.rho is not None) == (k % 5 == 0)
        if k in OBJECTIVE:
            # Seeds start 3 % apart (one standard deviation); later they are closer.
            assert report.loss + float(decay) == pytest.approx(OBJECTIVE[k], rel=0.08)


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


def test_no_run_is_made_twice(monkeypatch, tmp_path, capsys):
    cases = torch.rand(80, 16, generator=torch.Generator().manual_seed(0))
    tiny = task.autoencoder_task(PROBLEM, cases[:60], cases[60:])
    monkeypatch.setattr(authors_run, "_load", lambda: tiny)
    words = ("bench", "authors-run", "--seeds", 2, "--fractions", 0.5, "--iterations", 5, "--threads", 1,
             "--rows", tmp_path / "rows.jsonl", "--output", tmp_path / "authors.md")  # fmt: skip
    assert kronfac(*words) == 0
    kept = (tmp_path / "rows.jsonl").read_text()
    rows = [json.loads(line) for line in kept.splitlines()]
    assert [(row["seed"], row["k"]) for row in rows] == [
        (s, k) for s in (0, 1) for k in range(1, 6)
    ]
    assert {row["m"] for row in rows} == {60}, "a mini-batch is at most all cases"
    text = (tmp_path / "authors.md").read_text()
    assert "Made by `kronfac bench authors-run --threads 1 --seeds 2" in text
    capsys.readouterr()
    assert kronfac(*words) == 0
    assert "seed 0, τ₂ = 0.5\n" not in capsys.readouterr().out
    assert (tmp_path / "rows.jsonl").read_text() == kept
