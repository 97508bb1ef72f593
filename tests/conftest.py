"""Builders that tests share; import them with `from tests.conftest import …`."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import hypothesis
import pytest
import torch
from torch import Tensor, nn

from kronfac.model import Buffers, Network, find_units
from kronfac.objective import Bernoulli, Categorical, Gaussian, Likelihood, objective_of
from kronfac.record import Batch, LossCall, ModelCall, Pass, Ref

torch.set_num_threads(1)
hypothesis.settings.register_profile(
    "kronfac", deadline=None, derandomize=True, database=None, max_examples=60
)
hypothesis.settings.load_profile("kronfac")

ALGEBRA = {"rtol": 1e-10, "atol": 1e-12}
"""Tolerance for linear algebra in float64."""
AUTODIFF = {"rtol": 1e-8, "atol": 1e-10}
"""Tolerance where derivatives are taken in two ways."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "relu": nn.ReLU,
    "identity": nn.Identity,
}
LIKELIHOODS: dict[str, Callable[[], Likelihood]] = {
    "gaussian": lambda: Gaussian(variance=1.0),
    "bernoulli": Bernoulli,
    "categorical": Categorical,
}


@pytest.fixture(autouse=True)
def _reproducible():
    torch.manual_seed(0)


def forked(work: Callable[[], int], timeout: float = 120) -> int:
    """What `work` returns in a forked process, a small number; 255 if it fails, or takes too long."""
    child = os.fork()
    if not child:
        code = 255
        try:
            code = work()
        finally:
            os._exit(code)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 255


def seeded(seed: int = 0) -> torch.Generator:
    """A new CPU generator."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal numbers that depend on the seed and the shape alone."""
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


def spd(size: int, seed: int = 0, floor: float = 0.1) -> Tensor:
    """A positive definite matrix, eigenvalues from `floor` to about 4 + `floor`."""
    X = normal(size, 2 * size, seed=seed)
    return X @ X.mT / (2 * size) + floor * torch.eye(size, dtype=torch.float64)


def psd(size: int, rank: int, seed: int = 0) -> Tensor:
    """A positive semi-definite matrix of this rank."""
    X = normal(size, rank, seed=seed)
    return X @ X.mT / max(rank, 1)


def mlp(
    widths: Sequence[int],
    activation: str | Callable[[], nn.Module] = "tanh",
    bias: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    gain: float = 1.0,
) -> nn.Sequential:
    """Linear layers with an activation between them, weights N(0, gain²/in), biases N(0, ¼)."""
    make = ACTIVATIONS[activation] if isinstance(activation, str) else activation
    generator = seeded(seed)
    modules: list[nn.Module] = []
    for i, (d_in, d_out) in enumerate(pairwise(widths)):
        layer = nn.Linear(d_in, d_out, bias=bias, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.normal_(0, gain / d_in**0.5, generator=generator)
            if bias:
                layer.bias.normal_(0, 0.5, generator=generator)
        modules += [layer] if i == 0 else [make(), layer]
    return nn.Sequential(*modules).to(dtype)


def passes_either_way() -> Any:
    """A fixture that runs every test twice: `mlp` is a perceptron, through which passes go by hand."""

    @pytest.fixture(params=["by hand", "by torch"], autouse=True)
    def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        if request.param == "by torch":
            monkeypatch.setattr("kronfac.linearize.by_hand._way", lambda *_: None)

    return passes


def random_targets(outputs: Tensor, likelihood: str, seed: int = 1) -> Tensor:
    """Targets that fit the outputs, drawn without regard to them."""
    generator = seeded(seed)
    if likelihood == "categorical":
        return torch.randint(outputs.shape[1], (len(outputs),), generator=generator)
    if likelihood == "bernoulli":
        return torch.rand(outputs.shape, generator=generator, dtype=torch.float64).to(outputs.dtype)
    return torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs.dtype)


def network_of(model: nn.Module, loss: nn.Module | None = None) -> Network:
    """The network that KFAC makes of a model and a loss."""
    found = find_units(model)
    objective = objective_of(loss or Gaussian())
    return Network(model, found.units, found.sites, objective, Buffers(model))


def batch(
    network: Network, x: Tensor, targets: Tensor | None = None, chunk: int | None = None
) -> Batch:
    """The mini-batch that a closure would have recorded, in calls of `chunk` examples."""
    objective, passes = network.objective, []
    for start in range(0, len(x), chunk or len(x)):
        part = slice(start, start + (chunk or len(x)))
        with torch.no_grad():
            outputs = network.model(x[part])
        call = ModelCall((x[part],), {}, outputs=(0,))
        if targets is None:
            loss = LossCall(0, objective.declare(outputs.shape))
        else:
            y = targets[part]
            value = objective.module(outputs, y)
            loss = LossCall(0, objective.read(outputs, y), value, objective.module, (Ref(0), y), {})
        share = len(x[part]) / len(x) if objective.mean else 1.0
        passes.append(Pass((call,), (loss.scaled(share),)))
    return Batch(tuple(passes), seen=targets is not None)
