"""`kronfac bench`: tiny real runs, what they leave behind, and what happens to mistakes."""

import json
import re

import pytest
import torch

from kronfac_experiments.bench import refresh, step
from kronfac_experiments.options import command_line
from tests.experiments.runs import kronfac

STEP = ("bench", "step", "--problem", "curves", "--threads", 1)
STEP += ("--batches", 20, "--repeats", 2, "--steps", 2, "--inverses", "block_diagonal")
REFRESH = ("bench", "refresh", "--threads", 1, "--widths", 8, 16, "--repeats", 2, "--layers", 2)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def assert_self_contained(page):
    assert not re.search(r'(src|href)="(?!#|data:)', page)
    assert "<script" not in page


def test_a_step_is_measured_and_counted_by_part(folder, capsys):
    assert kronfac(*STEP, "--output", "docs/step.md") == 0
    out = capsys.readouterr().out
    assert "preset paper (τ₁ = 1/8, τ₂ = 1/4, T₁ = 5, T₂ = 20, T₃ = 20)" in out
    saved = json.loads((folder / "runs/bench-step-curves-paper/step.json").read_text())
    (trial,) = saved["trials"]
    assert len(trial["sgd_seconds"]) == len(trial["kfac_seconds"]) == 2
    assert {"gradient", "statistics", "direction", "fisher_products"} <= set(trial["parts"])
    assert set(trial["operations"]) - {"inverse", "reduction_ratio"} <= set(trial["parts"])
    text = (folder / "docs/step.md").read_text()
    assert "Made by `kronfac bench step --threads 1 --output docs/step.md --problem curves" in text
    assert "float32, 1 thread, seed 0, torch" in text
    assert "| block-diagonal, m = 20 |" in text
    page = (folder / "runs/bench-step-curves-paper/step.html").read_text()
    assert_self_contained(page)
    assert "block-diagonal, m = 20" in page


def test_what_was_measured_is_not_measured_again(folder, capsys):
    assert kronfac(*STEP) == 0
    path = folder / "runs/bench-step-curves-paper/step.json"
    # A number that no clock would give shows whether the measurement is kept.
    rewrite(path, lambda content: content["trials"][0].update(kfac_seconds=[7.0, 7.0]))
    capsys.readouterr()
    assert kronfac(*STEP, "--inverses", "block_diagonal", "block_tridiagonal") == 0
    assert "2 of 2: block-tridiagonal, m = 20" in (out := capsys.readouterr().out)
    assert "1 of 2" not in out
    trials = json.loads(path.read_text())["trials"]
    assert [trial["name"] for trial in trials] == [
        "block-diagonal, m = 20",
        "block-tridiagonal, m = 20",
    ]
    assert trials[0]["kfac_seconds"] == [7.0, 7.0]


def test_ctrl_c_keeps_what_was_measured(folder, monkeypatch, capsys):
    real = refresh.chain_curvature

    def interrupted(width, layers, seed):
        if width == 16:
            raise KeyboardInterrupt
        return real(width, layers, seed)

    monkeypatch.setattr(refresh, "chain_curvature", interrupted)
    assert kronfac(*REFRESH) == 130
    assert "Continue with the same command" in capsys.readouterr().err
    monkeypatch.setattr(refresh, "chain_curvature", real)
    assert kronfac(*REFRESH) == 0
    assert "1 of 2" not in (out := capsys.readouterr().out)
    assert "2 of 2: d = 16" in out


def test_measurements_with_other_settings_are_not_mixed(folder, capsys):
    assert kronfac(*REFRESH, "--run-dir", "here") == 0
    capsys.readouterr()
    assert kronfac(*REFRESH, "--run-dir", "here", "--repeats", 3) == 2
    assert "other settings (repeats)" in capsys.readouterr().err


def test_the_command_says_what_is_not_default():
    config = step.StepConfig(seed=3, batches=(10, 20), output=None)
    assert command_line("bench step", config) == "kronfac bench step --seed 3 --batches 10 20"


MISTAKES = {
    "step --batches 0": "--batches is 1 or more; got 0",
    "step --batches 20001 --problem curves": "at most the 20,000 cases of curves; got 20001",
    "step --repeats 0": "--repeats is 1 or more",
    "step --inverse-lag -1": "--inverse-lag is 0 or more; got -1",
    "step --inverse-lag 11": "--inverse-lag is at most 10; got 11",
    "step --threads 0": "--threads is 1 or more",
    "step --seed -1": "--seed is 0 or more",
    "step --preset papers": "invalid choice 'papers'",
    "step --inverses diagonal": "diagonal",
    "refresh --layers 1": "--layers is 2 or more; got 1",
    "refresh --widths 0 4": "--widths is 1 or more; got 0 4",
    "refresh --gamma 0": "--gamma is positive",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_answered_in_one_line(words, folder, capsys):
    assert kronfac("bench", *words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert MISTAKES[words] in line
    assert not (folder / "runs").exists()


def test_a_refresh_is_measured_in_products(folder, capsys):
    assert kronfac(*REFRESH, "--output", "refresh.md") == 0
    out = capsys.readouterr().out
    assert "uniform chain of 2 layers" in out
    first, second = json.loads((folder / "runs/bench-refresh/refresh.json").read_text())["trials"]
    assert (first["width"], second["width"]) == (8, 16)
    for method in ("block-diagonal, Cholesky", "block-diagonal, exact Tikhonov"):
        assert len(first["prepare"][method]) == len(first["damped"][method]) == 2
    text = (folder / "refresh.md").read_text()
    assert re.search(r"\| block-tridiagonal, damped \| [\d.]+ \| [\d.]+ \| 7.00 \|", text)
    assert_self_contained((folder / "runs/bench-refresh/refresh.html").read_text())
    assert kronfac(*REFRESH) == 0
    assert "1 of 2" not in capsys.readouterr().out


def test_the_factors_of_the_chain_are_those_of_a_network():
    """Positive definite with their neighbours: every method can invert them."""
    curvature = refresh.chain_curvature(6, layers=3, seed=0)
    first, second, _ = curvature.blocks
    link, _ = curvature.links
    pair = torch.cat(
        [
            torch.cat([first.A, link.A_next], dim=1),
            torch.cat([link.A_next.mT, second.A], dim=1),
        ]
    )
    assert torch.linalg.eigvalsh(pair).min() >= -1e-6
    for method in refresh.METHODS.values():
        V = [torch.randn(6, 6) for _ in range(3)]
        product = method.prepare(curvature).damped(0.1).mv(V)
        assert sum(float((u * v).sum()) for u, v in zip(product, V, strict=True)) > 0
