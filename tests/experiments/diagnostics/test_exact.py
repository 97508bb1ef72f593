"""The exact Fisher against its definition."""

import pytest
import torch
from torch.testing import assert_close

from kronfac import Bernoulli, Categorical
from kronfac_experiments.diagnostics import Examples, exact_fisher
from tests.conftest import ALGEBRA, LIKELIHOODS, mlp, normal
from tests.reference import dense

WIDTHS = (3, 4, 2, 3)


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_equals_the_definition(likelihood, chunk):
    model, x = mlp(WIDTHS), normal(11, 3, seed=3)
    F = exact_fisher(Examples(model, LIKELIHOODS[likelihood](), x, chunk=chunk))
    assert_close(F.dense, dense.exact_fisher(model, x, likelihood), **ALGEBRA)
    assert torch.equal(F.dense, F.dense.mT)
    assert (F.names, F.sizes) == (("0", "2", "4"), (16, 10, 9))


def test_of_some_layers_is_a_part_of_the_whole():
    model, x = mlp(WIDTHS), normal(7, 3)
    whole = exact_fisher(Examples(model, Categorical(), x))
    part = exact_fisher(Examples(model, Categorical(), x, ("2", "4")))
    for i in range(2):
        for j in range(2):
            assert_close(part.block(i, j), whole.block(i + 1, j + 1), **ALGEBRA)


def test_layers_without_bias_and_with_relu():
    model, x = mlp(WIDTHS, "relu", bias=False), normal(9, 3)
    F = exact_fisher(Examples(model, Bernoulli(), x))
    assert_close(F.dense, dense.exact_fisher(model, x, "bernoulli"), **ALGEBRA)


def test_a_float32_model_is_evaluated_in_float64_and_left_alone():
    model = mlp(WIDTHS, dtype=torch.float32)
    x = normal(9, 3, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    F = exact_fisher(Examples(model, Categorical(), x))
    double = mlp(WIDTHS, dtype=torch.float32).double()
    assert_close(F.dense, dense.exact_fisher(double, x.double(), "categorical"), **ALGEBRA)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
