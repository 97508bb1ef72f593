"""F − F̃ as a sum of cumulants, entry by entry, with all x and y of a small model enumerated."""

import itertools

import pytest
import torch
from torch.testing import assert_close

from kronfac_experiments.diagnostics import (
    ApproximationError,
    Examples,
    cumulants,
    exact_fisher,
    kronecker_fisher,
)
from tests.conftest import LIKELIHOODS, mlp, normal
from tests.reference import dense
from tests.theory.enumeration import Outcomes
from tests.theory.test_cumulants import cumulant

WIDTHS = (2, 3, 2)
CASES = 5
EXACT = {"rtol": 0, "atol": 1e-12}


def outcomes(model, x, likelihood):
    """Every x with every y: ā and g of both layers, with their probabilities."""
    z = model(x).detach()
    if likelihood == "categorical":
        p = z.softmax(dim=1)
        scores, weights = p[:, None, :] - torch.eye(z.shape[1], dtype=z.dtype), p
    else:
        p = z.sigmoid()
        corners = list(itertools.product([0.0, 1.0], repeat=z.shape[1]))
        y = torch.tensor(corners, dtype=z.dtype)
        scores = p[:, None, :] - y
        weights = (p[:, None, :] * y + (1 - p[:, None, :]) * (1 - y)).prod(dim=2)
    times = weights.shape[1]
    a = [rows.repeat_interleave(times, dim=0) for rows in dense.layer_inputs(model, x)]
    g = [
        torch.einsum("coi,cyo->cyi", J, scores).flatten(0, 1)
        for J in dense.preactivation_jacobians(model, x)
    ]
    return Outcomes(x, x, weights.flatten() / len(x), a, g)


def by_weight(table):
    """ā⁽¹⁾ and g⁽¹⁾ for every weight, along the rows, and ā⁽²⁾ and g⁽²⁾ along the columns."""
    pairs = zip(table.activities, table.gradients, strict=True)
    pairs = [(a.repeat_interleave(g.shape[1], 1), g.repeat(1, a.shape[1])) for a, g in pairs]
    a, g = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
    return a[:, :, None], a[:, None, :], g[:, :, None], g[:, None, :]


@pytest.mark.parametrize("likelihood", ["bernoulli", "categorical"])
def test_terms_are_the_cumulants_of_the_joint_distribution(likelihood):
    model, x = mlp(WIDTHS), normal(CASES, 2, seed=2)
    terms = cumulants(Examples(model, LIKELIHOODS[likelihood](), x, chunk=2))
    table = outcomes(model, x, likelihood)
    a1, a2, g1, g2 = by_weight(table)
    fourth = cumulant(table, a1, a2, g1, g2)
    third = table.expectation(a1) * cumulant(table, a2, g1, g2)
    other = table.expectation(a2) * cumulant(table, a1, g1, g2)
    assert_close(terms.fourth.dense, fourth, **EXACT)
    assert_close(terms.third.dense, third, **EXACT)
    assert_close(terms.bound().dense, fourth.abs() + third.abs() + other.abs(), **EXACT)
    assert float(fourth.abs().max()) > 1e-3
    assert float(third.abs().max()) > 1e-3


@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_their_sum_is_the_error_of_every_entry(likelihood):
    model, x = mlp((3, 4, 2, 3)), normal(40, 3, seed=2)
    examples = Examples(model, LIKELIHOODS[likelihood](), x, chunk=7)
    terms = cumulants(examples)
    A, G = dense.moments(model, x, likelihood)
    error = dense.exact_fisher(model, x, likelihood) - dense.kron_fisher(A, G)
    assert_close(terms.error().dense, error, **EXACT)
    assert bool((terms.bound().dense >= error.abs() - 1e-12).all())
    ours = exact_fisher(examples) - kronecker_fisher(examples).dense()
    assert_close(ours.dense, error, **EXACT)


def test_the_error_in_numbers():
    examples = Examples(
        mlp((3, 4, 2, 3)), LIKELIHOODS["categorical"](), normal(40, 3, seed=2), ("2", "4")
    )
    F, F_tilde, terms = (
        exact_fisher(examples),
        kronecker_fisher(examples).dense(),
        cumulants(examples),
    )
    error = ApproximationError.of(F, F_tilde, terms)
    assert error.total == pytest.approx(float((F - F_tilde).dense.abs().sum()))
    assert error.relative == pytest.approx(error.total / float(F.dense.abs().sum()))
    assert error.bound == pytest.approx(
        error.fourth_order + 2 * float(terms.third.dense.abs().sum())
    )
    assert 0 < error.total < error.bound
    assert float(error.total_by_block.sum()) == pytest.approx(error.total)
    assert float(error.bound_by_block.sum()) == pytest.approx(error.bound)
    assert bool((error.total_by_block <= error.bound_by_block).all())


def test_nothing_is_left_where_inputs_do_not_vary():
    """A constant ā is independent of everything: F̃ = F, and every cumulant with it is 0."""
    x = torch.ones(6, 3, dtype=torch.float64)
    terms = cumulants(Examples(mlp((3, 4)), LIKELIHOODS["bernoulli"](), x))
    assert float(terms.bound().dense.sum()) < 1e-12
