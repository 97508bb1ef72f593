"""More than one preconditioned CG step on the exact-Fisher model [MG15 §6.4]."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac import KFAC, ConjugateGradients, FixedDamping, FixedGamma, Gaussian
from kronfac.linearize import fisher_product
from kronfac.storage import unpack
from tests.conformance import assert_relative
from tests.conftest import LIKELIHOODS, batch, mlp, network_of, normal, passes_either_way
from tests.reference import dense

LAMBDA, ETA = 0.3, 0.1

passes = passes_either_way()


def pcg(B, b, precondition, steps):
    """Textbook preconditioned conjugate gradients for B x = b from 0: all iterates."""
    x, r = torch.zeros_like(b), b.clone()
    z = precondition(r)
    p = z.clone()
    iterates = []
    for _ in range(steps):
        alpha = (r @ z) / (p @ B @ p)
        x = x + alpha * p
        new_r = r - alpha * B @ p
        new_z = precondition(new_r)
        p = new_z + (new_r @ new_z) / (r @ z) * p
        r, z = new_r, new_z
        iterates.append(x)
    return iterates


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("chunk", [None, 5])
def test_product_is_that_of_the_dense_fisher(likelihood, chunk):
    model, x = mlp([4, 5, 3, 2]), normal(12, 4)
    v = normal(len(dense.theta(model)), seed=1)
    network = network_of(model, LIKELIHOODS[likelihood]())
    Fv = fisher_product(
        network, batch(network, x, chunk=chunk), dense.unflatten(v, dense.shapes(model))
    )
    assert_relative(dense.flatten(Fv), dense.exact_fisher(model, x, likelihood) @ v)


def first_step(cg_steps):
    """θ before and after one step of KFAC, and what is needed to compute it densely."""
    model, x, y = mlp([3, 4, 2]), normal(20, 3), normal(20, 2, seed=1)
    optimizer = KFAC(
        model,
        Gaussian(),
        fisher="exact",
        weight_decay=ETA,
        damping=FixedDamping(LAMBDA),
        gamma=FixedGamma(0.5),
        step_rule=ConjugateGradients(momentum=False, cg_steps=cg_steps),
    )
    before = dense.theta(model).clone()
    B = dense.exact_fisher(model, x, "gaussian") + (LAMBDA + ETA) * torch.eye(len(before)).double()
    optimizer.step(optimizer.closure(x, y))
    gradient = torch.cat(
        [
            dense.vec(torch.cat([m.weight.grad, m.bias.grad[:, None]], dim=1))
            for m in model
            if isinstance(m, nn.Linear)
        ]
    )
    gradient = gradient + ETA * before
    inverse = unpack(optimizer.state_dict()["kfac"]["current"]["inverse"])

    def precondition(r):
        return dense.flatten(inverse.mv(dense.unflatten(r, dense.shapes(model))))

    return optimizer, dense.theta(model) - before, B, gradient, precondition


@pytest.mark.parametrize("cg_steps", [1, 2, 3, 5, 8])
def test_iterates_are_those_of_textbook_conjugate_gradients(cg_steps):
    optimizer, delta, B, gradient, precondition = first_step(cg_steps)
    expected = pcg(B, -gradient, precondition, cg_steps)[-1]
    assert_close(delta, expected, rtol=1e-8, atol=1e-10)
    change = expected @ B @ expected / 2 + gradient @ expected
    assert optimizer.report.predicted_change == pytest.approx(float(change), rel=1e-8)


def test_enough_steps_reach_the_minimiser_and_stop_there():
    _, delta, B, gradient, _ = first_step(200)
    assert_close(delta, torch.linalg.solve(B, -gradient), rtol=1e-6, atol=1e-8)


def test_momentum_starts_lower_and_ends_no_higher():
    """From the second iteration on the previous update is a direction too; ρ stays near 1."""
    model, x, y = mlp([3, 6, 2]), normal(40, 3), normal(40, 2, seed=1)
    optimizer = KFAC(model, Gaussian(), step_rule=ConjugateGradients(cg_steps=6))
    losses = [float(optimizer.step(optimizer.closure(x, y))) for _ in range(15)]
    assert all(b <= a for a, b in pairwise(losses))
    assert optimizer.report.mu is not None


def test_at_least_one_step():
    with pytest.raises(ValueError, match="at least one step"):
        ConjugateGradients(cg_steps=0)
