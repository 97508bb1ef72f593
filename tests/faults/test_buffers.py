"""Buffers of the model: after any step as after one forward pass of the closure."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import KFAC, LevenbergMarquardt
from tests.conftest import normal
from tests.faults.steps import closure_of, rejections


class Counter(nn.Module):
    """Counts its passes and averages what goes through."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.passes += 1
            self.mean.lerp_(x.mean(dim=0), 0.1)
        return x


def network(between: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), between, nn.Tanh(), nn.Linear(6, 2)
    return nn.Sequential(*layers).double()


SETTINGS = {
    "defaults": {},
    "every ρ": {"damping": LevenbergMarquardt(lambda_=0.1, interval=1)},
    "block_tridiagonal": {"inverse": "block_tridiagonal"},
}


def check(model: nn.Module, settings: str, own: bool) -> None:
    """Beside a copy that makes one forward pass at the parameters from which each step starts."""
    loss = nn.MSELoss()
    optimizer = KFAC(model, loss, **SETTINGS[settings])
    for step in range(8):
        x, y = normal(32, 4, seed=step), normal(32, 2, seed=100 + step)
        expected = copy.deepcopy(model)
        expected(x)
        users = closure_of(optimizer, lambda model, x=x, y=y: loss(model(x), y))
        optimizer.step(optimizer.closure(x, y) if own else users)
        assert not rejections(optimizer), "the copy would not have started where the step did"
        for (name, ours), truth in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert_close(ours, truth, rtol=1e-9, atol=1e-12, msg=f"{name} at step {step}: {ours}")


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("settings", SETTINGS)
def test_a_counter_counts_the_closures_pass_alone(settings, own):
    check(network(Counter(6)), settings, own)


@pytest.mark.parametrize("own", [False, True])
def test_batch_norm_in_train(own):
    check(network(nn.BatchNorm1d(6, affine=False)), "defaults", own)


@pytest.mark.parametrize("own", [False, True])
def test_batch_norm_in_eval_keeps_its_buffers(own):
    model = network(nn.BatchNorm1d(6, affine=False))
    model.eval()
    check(model, "defaults", own)


def test_after_a_rejected_step_too():
    """The closure is called twice then, of which the second call counts: it is at the accepted θ."""
    model = network(Counter(6))
    with torch.no_grad():
        model[3].weight.zero_()
        model[3].bias.zero_()
    loss = nn.MSELoss()
    optimizer = KFAC(model, loss)
    x, y = normal(32, 4), normal(32, 2, seed=1)
    optimizer.step(closure_of(optimizer, lambda model: loss(model(x), y)))
    first = copy.deepcopy(model)
    # From outputs of 0 a step towards y is a step away from −y.
    optimizer.step(closure_of(optimizer, lambda model: loss(model(x), -y)))
    assert rejections(optimizer) == 1
    assert int(model[1].passes) == int(first[1].passes) + 1 == 2
