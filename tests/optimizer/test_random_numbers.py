"""Random numbers: K-FAC has its own generator, and nothing else is random."""

from typing import Any

import pytest
import torch
from torch import nn

import kronfac
from kronfac import KFAC, GammaSearch, Intervals
from kronfac.extend import SampledFisher
from tests.conftest import mlp, normal
from tests.optimizer.runs import INVERSES, same, targets_for

LOSSES = {
    "gaussian": nn.MSELoss(),
    "bernoulli": kronfac.Bernoulli(),
    "categorical": nn.CrossEntropyLoss(),
}


def advance(optimizer: KFAC, steps: int) -> None:
    loss = optimizer.objective.module
    for step in range(steps):
        x = normal(15, 4, seed=step)
        optimizer.step(optimizer.closure(x, targets_for(loss, normal(15, 3, seed=99), seed=step)))


def run(loss: nn.Module, steps: int = 7, **settings) -> KFAC:
    periods = {"gamma": GammaSearch(interval=6), "intervals": Intervals(inverse_interval=3)}
    optimizer = KFAC(mlp([4, 5, 4, 3], seed=3), loss, weight_decay=1e-2, **periods | settings)
    advance(optimizer, steps)
    return optimizer


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_global_generator_is_left_alone(loss, inverse):
    model = mlp([4, 5, 4, 3], seed=3)
    before = torch.get_rng_state()
    periods = {"gamma": GammaSearch(interval=6), "intervals": Intervals(inverse_interval=3)}
    advance(KFAC(model, LOSSES[loss], inverse=inverse, **periods), steps=7)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_same_seed_gives_the_same_run_to_the_bit(loss, inverse):
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)  # which must not matter
        fisher = SampledFisher(seed=5)
        runs.append(run(LOSSES[loss], inverse=inverse, fisher=fisher))
    assert same(dict(runs[0].model.state_dict()), dict(runs[1].model.state_dict()))
    assert same(runs[0].state_dict(), runs[1].state_dict())


def moments(loss: nn.Module, fisher: SampledFisher) -> dict[str, Any]:
    """A and G of the first layer after a first step, which is taken at the same point by all."""
    return run(loss, steps=1, fisher=fisher).state_dict()["kfac"]["curvature"]["blocks"][0]


@pytest.mark.parametrize("loss", LOSSES)
def test_seeds_draw_other_targets_from_the_same_distribution(loss):
    loss = LOSSES[loss]
    one, other = (moments(loss, SampledFisher(seed=seed)) for seed in (1, 2))
    assert torch.equal(one["A"], other["A"])
    assert not torch.allclose(one["G"], other["G"], rtol=1e-3)
    # Over many seeds the mean is that of the expectation: 4 standard errors of the mean.
    exact = run(loss, steps=1, fisher="exact")
    truth = exact.state_dict()["kfac"]["curvature"]["blocks"][0]["G"].diagonal()
    draws = torch.stack(
        [moments(loss, SampledFisher(seed=seed))["G"].diagonal() for seed in range(60)]
    )
    bound = 4 * draws.std(dim=0) / len(draws) ** 0.5
    assert ((draws.mean(dim=0) - truth).abs() <= bound).all()


def test_a_step_draws_once_for_its_mini_batch():
    # Two steps draw other targets than one step twice: the generator moves on.
    loss = LOSSES["gaussian"]
    states = [run(loss, steps=steps).state_dict()["kfac"]["generator"] for steps in (1, 2)]
    fresh = KFAC(mlp([4, 5, 4, 3], seed=3), loss).state_dict()["kfac"]["generator"]
    assert not torch.equal(states[0], states[1])
    assert not torch.equal(states[0], fresh)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_the_other_fishers_draw_nothing(fisher):
    loss = LOSSES["gaussian"]
    fresh = KFAC(mlp([4, 5, 4, 3], seed=3), loss).state_dict()["kfac"]["generator"]
    assert torch.equal(run(loss, fisher=fisher).state_dict()["kfac"]["generator"], fresh)
