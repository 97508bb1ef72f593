"""The error of the Kronecker approximation in terms of cumulants [MG15 §3.1, App. A]."""

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kronfac import Bernoulli
from tests.reference.dense import kron
from tests.theory.enumeration import Outcomes, enumerate_outcomes
from tests.theory.networks import Network, curvature, fisher, random_network

SIZES = (2, 3, 2)
CASES = 5


@pytest.fixture(scope="module")
def problem() -> tuple[Network, Tensor]:
    generator = torch.Generator().manual_seed(0)
    network = random_network(SIZES, torch.tanh, generator)
    return network, torch.randn(CASES, SIZES[0], generator=generator, dtype=torch.float64)


@pytest.fixture(scope="module")
def outcomes(problem) -> Outcomes:
    return enumerate_outcomes(*problem)


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to divide `items` into non-empty sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for i, block in enumerate(smaller):
            yield [*smaller[:i], [first, *block], *smaller[i + 1 :]]


def cumulant(outcomes: Outcomes, *variables: Tensor) -> Tensor:
    """κ(X₁, …, Xₙ) = Σ_π (−1)^{|π|−1} (|π|−1)! Π_{B ∈ π} E[Π_{i ∈ B} X_i], π over all partitions.

    The variables are (outcomes, …), and broadcast against each other.
    """
    total = torch.zeros((), dtype=torch.float64)
    for partition in partitions(range(len(variables))):
        term = torch.ones((), dtype=torch.float64)
        for block in partition:
            product = variables[block[0]]
            for i in block[1:]:
                product = product * variables[i]
            term = term * outcomes.expectation(product)
        sign = (-1) ** (len(partition) - 1)
        total = total + sign * math.factorial(len(partition) - 1) * term
    return total


def all_pairs(outcomes: Outcomes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """ā⁽¹⁾, ā⁽²⁾, g⁽¹⁾, g⁽²⁾ over all units of all layers, each along a dimension of its own.

    Weights of two layers have ā's and g's of these layers; the formula holds for any, so all are here.
    """
    a, g = torch.cat(outcomes.activities, dim=1), torch.cat(outcomes.gradients, dim=1)
    return (
        a[:, :, None, None, None],
        a[:, None, :, None, None],
        g[:, None, None, :, None],
        g[:, None, None, None, :],
    )


def approximation_error(outcomes: Outcomes) -> Tensor:
    """E[ā⁽¹⁾ā⁽²⁾ g⁽¹⁾g⁽²⁾] − E[ā⁽¹⁾ā⁽²⁾] E[g⁽¹⁾g⁽²⁾]."""
    a1, a2, g1, g2 = all_pairs(outcomes)
    E = outcomes.expectation
    return E(a1 * a2 * g1 * g2) - E(a1 * a2) * E(g1 * g2)


def test_cumulants_of_orders_one_to_three():
    """§3.1: the first cumulants are mean and covariance; checked before they are used."""
    assert len(list(partitions(range(4)))) == 15
    generator = torch.Generator().manual_seed(1)
    X, Y, Z = torch.randn(3, 7, generator=generator, dtype=torch.float64)
    p = torch.rand(7, generator=generator, dtype=torch.float64)
    table = Outcomes(X, X, p / p.sum(), [], [])
    E = table.expectation
    X_c, Y_c, Z_c = X - E(X), Y - E(Y), Z - E(Z)
    assert_close(cumulant(table, X), E(X), rtol=1e-10, atol=1e-12)
    assert_close(cumulant(table, X, Y), E(X_c * Y_c), rtol=1e-10, atol=1e-12)
    assert_close(cumulant(table, X, Y, Z), E(X_c * Y_c * Z_c), rtol=1e-10, atol=1e-12)


def test_forward_quantities_are_uncorrelated_with_gradients(outcomes):
    """Lemma 4: E[u Dv] = 0 for u independent of y given the output, v anything computed on the way."""
    a, g = torch.cat(outcomes.activities, dim=1), torch.cat(outcomes.gradients, dim=1)
    centered = a - outcomes.expectation(a)
    units = {
        "1": torch.ones_like(a[:, :1]),
        "ā": a,
        "ā − E[ā]": centered,
        "products": (a[:, :, None] * centered[:, None, :]).flatten(1),
        "functions of x": torch.cat([outcomes.x.exp(), outcomes.x.sin()], dim=1),
    }
    for u in units.values():
        moment = outcomes.expectation(u[:, :, None] * g[:, None, :])
        assert_close(moment, torch.zeros_like(moment), rtol=0, atol=1e-12)
    # So Dθ has mean 0, and the Fisher is its covariance [§4.1].
    mean = outcomes.expectation(outcomes.D_theta)
    assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-12)


def test_the_lemma_needs_the_models_distribution(outcomes):
    """Lemma 4 is about P(y|x): not about u that involve y, and not about the training targets."""
    g = torch.cat(outcomes.gradients, dim=1)
    assert float(outcomes.expectation(g * g).min()) > 1e-4

    # Targets that are fair coins, as some training set might have them.
    uniform = torch.full_like(outcomes.probabilities, 1 / len(outcomes.probabilities))
    assert float((uniform @ g).abs().max()) > 1e-2


def test_error_is_a_sum_of_higher_cumulants(outcomes):
    """App. A and eqn. 3, the error for every pair of weights:

    κ(ā⁽¹⁾, ā⁽²⁾, g⁽¹⁾, g⁽²⁾) + E[ā⁽¹⁾] κ(ā⁽²⁾, g⁽¹⁾, g⁽²⁾) + E[ā⁽²⁾] κ(ā⁽¹⁾, g⁽¹⁾, g⁽²⁾)
    """
    a1, a2, g1, g2 = all_pairs(outcomes)
    E = outcomes.expectation
    terms = (
        cumulant(outcomes, a1, a2, g1, g2),
        E(a1) * cumulant(outcomes, a2, g1, g2),
        E(a2) * cumulant(outcomes, a1, g1, g2),
    )
    error = approximation_error(outcomes)
    assert_close(error, sum(terms), rtol=0, atol=1e-12)
    # Eqn. 4, the bound; and there is an error to speak of.
    assert bool((error.abs() <= sum(term.abs() for term in terms) + 1e-12).all())
    assert float(error.abs().max()) > 1e-2


def test_ten_of_the_fifteen_terms_vanish(outcomes):
    """App. A: κ(g⁽ᵏ⁾) = 0 and κ(ā⁽ᵏ⁾, g⁽ᵐ⁾) = 0, and of the fifteen terms only those without them stay."""
    variables = all_pairs(outcomes)
    shape = approximation_error(outcomes).shape
    kept, total = 0, torch.zeros(shape, dtype=torch.float64)
    for partition in partitions(range(4)):
        term = torch.ones((), dtype=torch.float64)
        for block in partition:
            term = term * cumulant(outcomes, *(variables[i] for i in block))
        total = total + term
        if float(term.abs().max()) > 1e-12:
            kept += 1
    assert kept == 5
    a1, a2, g1, g2 = variables
    assert_close(total, outcomes.expectation(a1 * a2 * g1 * g2), rtol=0, atol=1e-12)


def test_error_is_that_of_kronfacs_factors(problem, outcomes):
    """Eqn. 1: F − F̃ of kronfac, exact Fisher less Kronecker factors, has these errors for entries."""
    network, x = problem
    loss = Bernoulli()
    F = fisher(network, loss, x)
    assert_close(
        F,
        torch.einsum("o,oi,oj->ij", outcomes.probabilities, outcomes.D_theta, outcomes.D_theta),
        rtol=1e-8,
        atol=1e-10,
    )
    moments = curvature(network, loss, x, coupled=True)
    # ℓ = 2: the neighbouring blocks are all blocks there are.
    (link,), (first, second) = moments.links, moments.blocks
    cross = kron(link.A_next, link.G_next)
    F_tilde = torch.cat(
        [
            torch.cat([kron(first.A, first.G), cross], dim=1),
            torch.cat([cross.mT, kron(second.A, second.G)], dim=1),
        ]
    )
    # From errors by unit, (ā⁽¹⁾, ā⁽²⁾, g⁽¹⁾, g⁽²⁾), to errors by weight, (ā⁽¹⁾ g⁽¹⁾, ā⁽²⁾ g⁽²⁾).
    error = approximation_error(outcomes)
    a_of = [slice(0, SIZES[0] + 1), slice(SIZES[0] + 1, None)]
    g_of = [slice(0, SIZES[1]), slice(SIZES[1], None)]
    rows = []
    for i in range(2):
        blocks = []
        for j in range(2):
            block = error[a_of[i], a_of[j], g_of[i], g_of[j]].permute(0, 2, 1, 3)
            blocks.append(block.flatten(0, 1).flatten(1))
        rows.append(torch.cat(blocks, dim=1))
    assert_close(F - F_tilde, torch.cat(rows), rtol=0, atol=1e-10)
