"""Buffers of the model: after any step as after one forward pass of the closure."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import KFAC, LevenbergMarquardtRule, RawStep
from kronfac.record import record
from tests.conftest import normal
from tests.failures.steps import closure_of, rejections


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
    "every ρ": {"damping": LevenbergMarquardtRule(lambda_=0.1, interval=1)},
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


CASES = {
    **{f"counter, {settings}": (lambda: Counter(6), settings) for settings in SETTINGS},
    "BatchNorm in train": (lambda: nn.BatchNorm1d(6, affine=False), "defaults"),
    "BatchNorm in eval": (lambda: nn.BatchNorm1d(6, affine=False).eval(), "defaults"),
}


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_buffers_are_those_of_the_closures_pass_alone(case, own):
    make, settings = CASES[case]
    check(network(make()), settings, own)


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


# ------------------------------------------------------------- buffers that a pass reads and writes


class Annealed(nn.Module):
    """Outputs that depend on how often it was called, by a buffer that is written to or replaced."""

    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.replaces = replaces
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.replaces:
            self.passes = self.passes + 1
        else:
            self.passes += 1
        return x * (1 / self.passes)


class RunningNorm(nn.Module):
    """Normalises by a running average that this mini-batch is in, through a kernel that tells nobody."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(features, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        nn.functional.batch_norm(x.detach(), self.mean, self.variance, training=True, momentum=0.3)
        return (x - self.mean) / (self.variance + 0.1).sqrt()


def spectral() -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 6), nn.Linear(6, 2)
    first = nn.utils.parametrizations.spectral_norm(first)
    return nn.Sequential(first, nn.Tanh(), last).double()


STATEFUL = {
    "spectral_norm": spectral,
    "counter": lambda: network(Annealed(replaces=False)),
    "replaced counter": lambda: network(Annealed(replaces=True)),
    "running average": lambda: nn.Sequential(RunningNorm(4), *network(nn.Identity())),
}


@pytest.mark.parametrize("name", STATEFUL)
def test_own_passes_start_from_the_buffers_that_the_closures_passes_started_from(name):
    """Two micro-batches: the second starts from what the first has left."""
    model = STATEFUL[name]()
    network, loss = KFAC(model, nn.MSELoss()).network, nn.MSELoss()
    x, y = normal(32, 4), normal(32, 2, seed=1)
    with record(model, network.objective, network.buffers) as recording:
        expected = [model(x[half]) for half in (slice(16), slice(16, 32))]
        sum(loss(z, y[:16]) for z in expected).backward()
    after = {name: b.clone() for name, b in model.named_buffers()}
    for _ in range(2):
        for part, z in zip(recording.batch().passes, expected, strict=True):
            assert_close(part.run(model)[0], z, rtol=1e-14, atol=1e-14)
    for key, buffer in model.named_buffers():
        assert torch.equal(buffer, after[key]), key


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen a loss in the closure")
def test_rho_compares_a_function_with_itself(name, seen):
    """A step of next to nothing changes the loss as the gradient says: ρ = 1."""
    model, loss = STATEFUL[name](), nn.MSELoss()
    damping = LevenbergMarquardtRule(interval=1)
    optimizer = KFAC(model, loss, damping=damping, step_rule=RawStep(1e-4))
    x, y = normal(32, 4), normal(32, 2, seed=1)
    for _ in range(3):
        expected = copy.deepcopy(model)
        expected(x)
        users = closure_of(
            optimizer, lambda model: loss(model(x), y) if seen else (model(x) - y).square().mean()
        )
        optimizer.step(users)
        assert optimizer.report.rho == pytest.approx(1.0, abs=1e-3)
        for (key, ours), truth in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert_close(ours, truth, rtol=1e-9, atol=1e-12, msg=f"{key}: {ours}")
