"""`kronfac bench wide` against the dense quadratic model, and as a command."""

import pytest
import torch
from torch.testing import assert_close

from kronfac_experiments.bench.wide import WideConfig, train_head
from tests.experiments.runs import kronfac


@pytest.fixture(scope="module")
def head():
    return train_head(WideConfig(vocabulary=6, width=3, steps=5, examples=12))


def dense_fisher(head) -> torch.Tensor:
    """The mean of ā āᵀ ⊗ (diag p − p pᵀ) over V's entries, row by row."""
    total = 0
    for a, p in zip(head.inputs, head.probabilities, strict=True):
        total = total + torch.kron(torch.diag(p) - torch.outer(p, p), torch.outer(a, a))
    return total / len(head.inputs)


def test_fisher_products_are_those_of_the_dense_fisher(head):
    F = dense_fisher(head)
    V = torch.randn(head.gradient.shape, dtype=torch.float64)
    assert_close(head.fisher(V).reshape(-1), F @ V.reshape(-1), rtol=1e-10, atol=1e-12)
    assert_close(head.diagonal.reshape(-1), F.diagonal(), rtol=1e-10, atol=1e-12)


def test_the_best_decrease_is_that_of_the_dense_solution(head):
    B = dense_fisher(head) + 0.01 * torch.eye(head.gradient.numel(), dtype=torch.float64)
    solution = torch.linalg.solve(B, head.gradient.reshape(-1))
    expected = float(head.gradient.reshape(-1) @ solution) / 2
    assert head.smallest(0.01) == pytest.approx(expected, rel=1e-5)
    reached = head.decrease(solution.view_as(head.gradient), 0.01)
    assert reached == pytest.approx(expected)
    assert head.decrease(head.gradient, 0.01) < expected


def test_it_measures_and_writes_the_page(tmp_path):
    page = tmp_path / "page.md"
    sizes = ("--vocabulary", "30", "--width", "4", "--steps", "5", "--examples", "40")
    words = ("bench", "wide", *sizes, "--ranks", "2", "--run-dir", str(tmp_path / "runs"))
    assert kronfac(*words) == 0
    assert kronfac(*words, "--output", str(page)) == 0  # from what was measured
    text = page.read_text()
    assert "kronfac bench wide" in text
    assert "A ⊗ diagonal of G" in text
    assert "A ⊗ (rank 2 + diagonal) of G" in text
