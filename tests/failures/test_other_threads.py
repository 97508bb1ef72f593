"""Another thread evaluates the model while a step is taken: it sees the model, and never K-FAC's passes.

The other thread looks after every operation of the step, one after the other, so that the tests do not
depend on luck.
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from kronfac import KFAC, FixedDamping, FixedGamma, LevenbergMarquardtRule
from tests.conftest import mlp, normal
from tests.failures.steps import closure_of

X, Y, LOOKED_AT = normal(16, 4), normal(16, 2, seed=1), normal(3, 4, seed=2)


class Doubled(nn.Module):
    """A network that is no plain chain of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp([4, 6, 2])

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * self.inner(x)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "perceptron": (lambda: mlp([4, 6, 2]), 1.0),
    "custom": (Doubled, 2.0),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no trials": {"damping": FixedDamping(0.1), "gamma": FixedGamma(0.3)},
    "every ρ": {"damping": LevenbergMarquardtRule(lambda_=0.1, interval=1)},
    "block_tridiagonal": {"inverse": "block_tridiagonal"},
}


class Watched(TorchDispatchMode):
    """After every operation of this thread, another one looks at the model."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__()
        self.look, self.count = look, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += 1
        other = threading.Thread(target=self.look)
        other.start()
        other.join()
        return result


class Observer:
    """What the other thread saw: exceptions, wrong outputs, and the parameters' values."""

    def __init__(self, model: nn.Module, factor: float) -> None:
        self.model, self.factor = model, factor
        self.own = list(model.parameters())  # the tensors themselves, whatever stands in for them
        self.exceptions: list[Exception] = []
        self.wrong, self.seen = 0, 0
        self.values: list[list[Tensor]] = []

    def look(self) -> None:
        with torch.no_grad():
            theta = [p.clone() for p in self.own]
            try:
                outputs = self.model(LOOKED_AT)
            except Exception as error:
                self.exceptions.append(error)
                return
            self.seen += 1
            W1, b1, W2, b2 = theta
            expected = self.factor * (torch.tanh(LOOKED_AT @ W1.mT + b1) @ W2.mT + b2)
            right = outputs.shape == expected.shape and torch.allclose(
                outputs, expected, rtol=1e-12, atol=1e-12
            )
            self.wrong += not right
            self.values.append(theta)


def observe(network: str, settings: str, own: bool) -> tuple[Observer, int]:
    """Two steps under observation; how many tensors were seen with values of neither end of a step."""
    make, factor = NETWORKS[network]
    model, loss = make(), nn.MSELoss()
    optimizer = KFAC(model, loss, **SETTINGS[settings])
    observer, between = Observer(model, factor), 0
    for _ in range(2):
        before = [p.detach().clone() for p in model.parameters()]
        observer.values.clear()
        users = closure_of(optimizer, lambda model: loss(model(X), Y))
        closure = optimizer.closure(X, Y) if own else users
        with Watched(observer.look) as watched:
            optimizer.step(closure)
        assert watched.count > 50
        after = [p.detach().clone() for p in model.parameters()]
        for theta in observer.values:
            for value, old, new in zip(theta, before, after, strict=True):
                between += not (torch.equal(value, old) or torch.equal(value, new))
    return observer, between


CONFIGURATIONS = [(n, s, own) for n in NETWORKS for s in SETTINGS for own in (False, True)]


@pytest.mark.parametrize(("network", "settings", "own"), CONFIGURATIONS)
def test_another_thread_sees_no_exception_and_right_outputs_only(network, settings, own):
    """Right are the outputs of the parameters as they are at that moment.

    Every parameter of a perceptron is as before or as after the step, one tensor after the other.
    """
    observer, between = observe(network, settings, own)
    assert not observer.exceptions
    assert observer.wrong == 0
    assert observer.seen > 100
    assert network != "perceptron" or settings == "block_tridiagonal" or between == 0


class LookedAt(nn.Module):
    """Evaluates a model in another thread, in the middle of every pass of this one."""

    def __init__(self) -> None:
        super().__init__()
        self.model: list[nn.Module] = []
        self.raised: list[Exception] = []
        self.looks = self.in_forward_mode = 0
        self.owner = threading.get_ident()

    def forward(self, x: Tensor) -> Tensor:
        if self.model and threading.get_ident() == self.owner:
            other = threading.Thread(target=self.look, args=(x.detach()[:1],))
            other.start()
            other.join()
        return x

    def look(self, x: Tensor) -> None:
        self.looks += 1
        try:
            with torch.no_grad():
                self.model[0](torch.zeros(2, 1, 6, 6, dtype=x.dtype))
            if forward_ad._current_level >= 0:  # of the process, not of a thread
                self.in_forward_mode += 1
                parts = [forward_ad.unpack_dual(p).tangent for p in self.model[0].parameters()]
                assert all(tangent is None for tangent in parts)
        except Exception as error:
            self.raised.append(error)


def test_other_threads_can_evaluate_a_convolutional_network_in_every_pass():
    look = LookedAt()
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Tanh(), look, nn.GroupNorm(1, 3), nn.Flatten(), nn.Linear(48, 2)
    ).double()
    look.model.append(model)
    loss = nn.MSELoss()
    optimizer = KFAC(model, loss)
    x, y = normal(12, 1, 6, 6), normal(12, 2, seed=1)
    for _ in range(4):
        optimizer.step(closure_of(optimizer, lambda m: loss(m(x), y)))
    assert look.looks > look.in_forward_mode > 3
    assert not look.raised
    assert optimizer.network.learned.forward_mode
