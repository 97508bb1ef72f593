import copy
import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac_experiments.baseline import NesterovMomentum, momentum_at
from tests.conftest import ALGEBRA, normal, spd


@pytest.mark.parametrize("maximum", [0.9, 0.99, 0.999])
def test_momentum_rises_as_published(maximum):
    for t in (0, 1, 249, 250, 499, 500, 1250, 12_345, 750_000):
        published = 1 - 2 ** (-1 - math.log2(t // 250 + 1))
        assert_close(momentum_at(t, maximum), min(published, maximum))
    assert [momentum_at(t, 0.999) for t in (0, 250, 750)] == [0.5, 0.75, 0.875]


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_equals_the_published_update_across_rises_of_the_momentum(weight_decay):
    """h(θ) = ½ θᵀHθ − bᵀθ + η/2 ‖θ‖², the update written with θ, v and the gradient at θ + μv."""
    H, b, start = spd(5), normal(5, seed=1), normal(5, seed=2)
    lr, mu_max = 0.02, 0.8
    phi = nn.Parameter(start.clone())
    optimizer = NesterovMomentum([phi], lr=lr, mu_max=mu_max, weight_decay=weight_decay)
    theta, v = start.clone(), torch.zeros_like(start)
    for t in range(600):
        mu = min(1 - 2 ** (-1 - math.log2(t // 250 + 1)), mu_max)
        at = theta + mu * v
        assert_close(phi.detach(), at, **ALGEBRA)
        v = mu * v - lr * (H @ at - b + weight_decay * at)
        theta = theta + v

        def closure():
            optimizer.zero_grad()
            loss = phi @ H @ phi / 2 - b @ phi
            loss.backward()
            return loss

        optimizer.step(closure)
        assert_close(optimizer.state[phi]["velocity"], v, **ALGEBRA)
    assert_close(theta, torch.linalg.solve(H + weight_decay * torch.eye(5), b), rtol=0, atol=1e-3)


def test_works_on_gradients_that_are_there_and_skips_what_has_none():
    used, unused = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = NesterovMomentum([used, unused], lr=0.1)
    used.grad = torch.ones(2)
    assert optimizer.step() is None
    assert_close(used.detach(), torch.full((2,), 1 - 0.1 - 0.5 * 0.1))
    assert torch.equal(unused, torch.ones(2))


def test_continues_from_its_state():
    def run(optimizer, parameter, steps):
        for _ in range(steps):
            parameter.grad = parameter.detach().sin()
            optimizer.step()

    one = nn.Parameter(normal(4))
    first = NesterovMomentum([one], lr=0.05)
    run(first, one, 249)  # the next step is the first with another μ after it
    other = nn.Parameter(one.detach().clone())
    second = NesterovMomentum([other], lr=0.05)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(first, one, 3)
    run(second, other, 3)
    assert torch.equal(one, other)


@pytest.mark.parametrize(
    "settings",
    [{"lr": 0.0}, {"lr": math.inf}, {"lr": math.nan}, {"lr": 0.1, "mu_max": 1.0},
     {"lr": 0.1, "mu_max": -0.1}, {"lr": 0.1, "weight_decay": -1.0}],
)  # fmt: skip
def test_refuses_settings_that_make_no_sense(settings):
    with pytest.raises(ValueError, match="NesterovMomentum needs"):
        NesterovMomentum([nn.Parameter(torch.ones(1))], **settings)
