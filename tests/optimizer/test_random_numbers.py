"""Random numbers: K-FAC has its own generator, and nothing else is random."""

from itertools import pairwise
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


def run(loss: nn.Module, steps: int = 7, model: nn.Module | None = None, **settings) -> KFAC:
    periods = {"gamma": GammaSearch(interval=6), "intervals": Intervals(inverse_interval=3)}
    model = mlp([4, 5, 4, 3], seed=3) if model is None else model
    optimizer = KFAC(model, loss, weight_decay=1e-2, **periods | settings)
    for step in range(steps):
        x = normal(15, 4, seed=step)
        optimizer.step(optimizer.closure(x, targets_for(loss, normal(15, 3, seed=99), seed=step)))
    return optimizer


@pytest.mark.parametrize("inverse", INVERSES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_same_seed_gives_the_same_run_whatever_torchs_own_generator_is(loss, inverse):
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model, before = mlp([4, 5, 4, 3], seed=3), torch.get_rng_state()
        runs.append(run(LOSSES[loss], model=model, inverse=inverse, fisher=SampledFisher(seed=5)))
        assert torch.equal(torch.get_rng_state(), before)
    assert same(dict(runs[0].model.state_dict()), dict(runs[1].model.state_dict()))
    assert same(runs[0].state_dict(), runs[1].state_dict())


def moments(loss: nn.Module, fisher: SampledFisher) -> dict[str, Any]:
    """A and G of the first layer after a first step, which is taken at the same point by all."""
    return run(loss, steps=1, fisher=fisher).state_dict()["kfac"]["curvature"]["blocks"][0]


@pytest.mark.parametrize("loss", LOSSES)
def test_seeds_draw_other_targets(loss):
    loss = LOSSES[loss]
    one, other = (moments(loss, SampledFisher(seed=seed)) for seed in (1, 2))
    assert torch.equal(one["A"], other["A"])
    assert not torch.allclose(one["G"], other["G"], rtol=1e-3)


@pytest.mark.parametrize(
    ("fisher", "draws"), [("sampled", True), ("exact", False), ("empirical", False)]
)
def test_only_the_sampled_fisher_draws(fisher, draws):
    """And so that two steps draw other targets than one step twice."""
    generators = [
        run(LOSSES["gaussian"], steps=steps, fisher=fisher).state_dict()["kfac"]["generator"]
        for steps in (0, 1, 2)
    ]
    assert [torch.equal(a, b) for a, b in pairwise(generators)] == [not draws] * 2
