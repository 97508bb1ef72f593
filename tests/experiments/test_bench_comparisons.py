"""`kronfac bench authors-run`, `classifier` and `mnist-comparison`, on small data."""

import csv
import json
import math

import pytest
import torch

import kronfac as library
from kronfac_experiments import problems, suite, task
from kronfac_experiments.bench import authors_run, classifier, mnist_comparison
from kronfac_experiments.bench.authors_run import AuthorsRunConfig, AuthorsTrial, compare_with_log
from kronfac_experiments.bench.classifier import ClassifierTrial
from kronfac_experiments.bench.mnist_comparison import STYLES
from kronfac_experiments.data.mnist import LabelledImages, Mnist
from kronfac_experiments.report.runs import read_runs
from tests.experiments.fabricated_runs import metrics, write_run
from tests.experiments.runs import kronfac

PROBLEM = problems.Problem("mnist", (16, 8, 3, 8, 16), "bernoulli", 1e-5, 60, 20)


@pytest.fixture
def tiny_mnist(monkeypatch):
    """An autoencoder of 60 cases in the place of MNIST's."""
    cases = torch.rand(80, 16, generator=torch.Generator().manual_seed(0))
    tiny = task.autoencoder_task(PROBLEM, cases[:60], cases[60:])
    for module in (authors_run, suite):
        monkeypatch.setattr(module, "load_task", lambda config: tiny)
    return tiny


# --- the authors' run --------------------------------------------------------------


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


def test_the_log_is_compared_row_by_row(tmp_path):
    log = tmp_path / "log.csv"
    lines = ["iter,m,new_lambda", "1,1001,150", "2,1002,", "3,1004,150.1"]
    log.write_text("\n".join(lines))
    rows = authors_rows(0, 1.0)
    assert compare_with_log(rows[:2], log).endswith("m differs at none, λ differs at none.")
    assert compare_with_log(rows[:3], log).endswith("m differs at [3], λ differs at [3].")


def test_the_authors_run_is_the_papers_preset_and_none_is_run_twice(tiny_mnist, tmp_path, capsys):
    words = ("bench", "authors-run", "--seeds", 2, "--fractions", 0.5, "--iterations", 5, "--threads", 1,
             "--run-dir", tmp_path, "--output", tmp_path / "out" / "authors.md")  # fmt: skip
    assert kronfac(*words) == 0
    lines = (tmp_path / "out" / "authors.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["seed"], row["k"]) for row in rows] == [
        (s, k) for s in (0, 1) for k in range(1, 6)
    ]
    x = tiny_mnist.train.inputs
    model = tiny_mnist.make_model(1)
    optimizer = library.KFAC(
        model,
        library.Bernoulli(),
        inverse="block_tridiagonal",
        weight_decay=1e-5,
        **library.presets.paper() | {"fisher_fraction": 0.5},
    )
    sizes = library.ExponentialBatchSize(60, 60, 500)
    sampler = library.ScheduledBatchSampler(60, sizes, seed=1)
    for row in rows[5:]:
        batch = x[sampler.next_indices()]
        optimizer.step(optimizer.closure(batch, batch, chunk=5000))
        report = optimizer.report
        assert (row["m"], row["loss"], row["lambda"], row["gamma"], row["alpha"], row["mu"]) == (
            60, report.loss, report.lambda_, report.gamma, report.alpha, report.mu,
        )  # fmt: skip
    text = (tmp_path / "out" / "authors.md").read_text()
    assert "Made by `kronfac bench authors-run --threads 1 --output" in text
    capsys.readouterr()
    before = (tmp_path / "authors_run.json").read_bytes()
    assert kronfac(*words) == 0
    assert "1 of 2" not in capsys.readouterr().out
    assert (tmp_path / "authors_run.json").read_bytes() == before


# --- the classifier ----------------------------------------------------------------


def classified(lambda_: float, seed: int, *errors: float) -> ClassifierTrial:
    return ClassifierTrial(f"{lambda_}, {seed}", 1000, lambda_, seed, list(errors))


def test_iterations_to_an_error_are_counted_from_one():
    trial = classified(1.0, 0, 50.0, 5.0, 2.0, 0.0)
    assert [trial.iterations_to(error) for error in (60, 5, 4.9, 0)] == [1, 2, 3, 4]
    assert math.isinf(classified(1.0, 0, 50.0, 5.1).iterations_to(5))


def test_the_best_lambda_reaches_zero_first_or_ends_lowest():
    trials = [
        *(classified(0.1, s, 5.0, 4.0, 0.0) for s in range(3)),
        *(classified(1.0, s, 5.0, 0.0) for s in range(2)),
        classified(1.0, 2, 9.0, 8.0, 7.0),
    ]
    paper, *rows = classifier.table(trials).rows
    assert paper[3:] == ["7", "22", "0 % at 22"]
    assert rows == [
        ["here", "1,000", "0.1", "1 (1 – 1)", "3 (3 – 3)", "0 % (0 % – 0 %)"],
        ["**here**", "1,000", "1", "1 (1 – not)", "2 (2 – not)", "0 % (0 % – 7 %)"],
    ]


def test_the_classifier_stops_at_no_mistakes(monkeypatch, tmp_path):
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(40) % 10
    images = torch.nn.functional.one_hot(labels, 256).float()
    images += 0.1 * torch.rand(40, 256, generator=generator)
    small = LabelledImages(images, labels)
    monkeypatch.setattr(classifier, "mnist_16x16", lambda: Mnist(small, small))
    words = ("--cases", 40, "--lambdas", 0.01, "--seeds", 1, "--iterations", 40, "--threads", 1)
    output = tmp_path / "classifier.md"
    assert kronfac("bench", "classifier", *words, "--run-dir", tmp_path, "--output", output) == 0
    (trial,) = json.loads((tmp_path / "classifier.json").read_text())["trials"]
    assert trial["errors"][-1] == 0
    assert all(error > 0 for error in trial["errors"][:-1])
    assert f"| {len(trial['errors'])} (" in output.read_text()


def test_more_cases_than_there_are_is_a_mistake(monkeypatch, tmp_path, capsys):
    nothing = LabelledImages(torch.zeros(3, 256), torch.zeros(3, dtype=torch.long))
    monkeypatch.setattr(classifier, "mnist_16x16", lambda: Mnist(nothing, nothing))
    assert kronfac("bench", "classifier", "--cases", 4, "--run-dir", tmp_path / "run") == 2
    assert "--cases is at most 3; got 4" in capsys.readouterr().err


# --- MNIST in equal time -----------------------------------------------------------


def test_the_comparison_has_medians_at_equal_marks(tmp_path):
    """The fabricated errors are proportional to the scale: 201 of it at the start."""
    methods = {}
    for scale, label in enumerate(STYLES, start=1):
        folders = [
            write_run(tmp_path / f"{scale}-{seed}", metrics(scale=scale * (1 + seed / 10)))
            for seed in range(3)
        ]
        methods[label] = read_runs(folders)
    seconds, iterations, cases, reached, progress = mnist_comparison.tables(methods)
    error = 0.9 * (1 + 200 * math.exp(-5))  # of the averaged parameters at iteration 50
    assert [row[1] for row in iterations.rows] == [
        f"{1.1 * s * error:.3g} ({s * error:.3g} – {1.2 * s * error:.3g})" for s in (1, 2, 3, 4)
    ]
    assert seconds.rows[0][1:] == ["not reached"] * 4, "the runs end after 6 s"
    assert cases.columns == [
        "",
        "100,000 cases",
        "200,000 cases",
        "500,000 cases",
        "1,000,000 cases",
    ]
    assert reached.rows[0][1:3] == ["60 (60 – 60)", "30000 (30000 – 30000)"]
    ratio = float(progress.rows[1][3].split()[0])
    assert ratio > 1, "with twice the error the same error takes longer"


def test_the_comparison_is_run_written_and_not_run_again(tiny_mnist, tmp_path, capsys):
    words = ("bench", "mnist-comparison", "--seeds", 1, "--seconds", 0.05, "--threads", 1,
             "--evaluation-cases", 20, "--run-dir", tmp_path / "runs",
             "--output", tmp_path / "comparison.md")  # fmt: skip
    assert kronfac(*words) == 0
    with (tmp_path / "comparison.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["method"] for row in rows} == set(STYLES)
    text = (tmp_path / "comparison.md").read_text()
    assert "kronfac bench mnist-comparison --threads 1" in text
    assert "](comparison.png)" in text
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    folders = [path for path in (tmp_path / "runs").iterdir() if path.is_dir()]
    assert len(folders) == 4
    before = {path: (path / "metrics.jsonl").read_bytes() for path in folders}
    assert kronfac(*words) == 0
    assert {path: (path / "metrics.jsonl").read_bytes() for path in folders} == before


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("authors-run --fractions 2", "--fractions are in (0, 1]"),
        ("authors-run --log absent.csv", "there is no absent.csv"),
        ("authors-run --iterations 0", "--iterations is 1 or more; got 0"),
        ("classifier --lambdas 0", "--lambdas are positive"),
        ("classifier --cases 0", "--cases is 1 or more; got 0"),
        ("mnist-comparison --seeds 0", "--seeds is 1 or more; got 0"),
        ("mnist-comparison --seconds -1", "--seconds is finite, 0 or more"),
    ],
)
def test_mistakes_get_one_line(words, line, capsys):
    assert kronfac("bench", *words.split()) == 2
    assert line in capsys.readouterr().err
