"""DeepXDE: Poisson's equation, with derivatives that K-FAC sees."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kronfac.errors import UnsupportedModelError
from kronfac.integrations import deepxde as integration

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture
def dde(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DDE_BACKEND", "pytorch")
    library = pytest.importorskip("deepxde")
    before = torch.get_default_dtype()
    library.config.set_default_float("float64")
    yield library
    library.config.set_default_float("float32")
    torch.set_default_dtype(before)


def poisson(dde: Any, pde: Any, net: Any) -> Any:
    """u'' = −π² sin πx on [−1, 1], with u = 0 at the ends."""
    geometry = dde.geometry.Interval(-1, 1)
    ends = dde.icbc.DirichletBC(geometry, lambda x: 0, lambda x, on: on, component=0)
    data = dde.data.PDE(geometry, pde, ends, num_domain=100, num_boundary=2)
    return dde.Model(data, net)


def network() -> Any:
    torch.manual_seed(0)
    return integration.network(
        nn.Sequential(
            nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        ).double()
    )


def test_it_solves_poissons_equation(dde, capsys):
    net = network()

    def pde(x: Tensor, y: Tensor) -> Tensor:
        return net.jet(y).second[:, 0] + math.pi**2 * torch.sin(math.pi * x)

    model = poisson(dde, pde, net)
    model.compile(integration.kfac(net), loss=integration.squared_error, loss_weights=[1, 100])
    history, _ = model.train(iterations=60, display_every=60)
    assert sum(history.loss_train[0]) > 10
    assert sum(history.loss_train[-1]) < 0.02
    x = np.linspace(-1, 1, 100).reshape(-1, 1)
    assert np.abs(model.predict(x)[:, :1] - np.sin(math.pi * x)).max() < 0.02


def test_the_columns_are_the_derivatives(dde):
    net = network()
    x = torch.linspace(-1, 1, 7, dtype=torch.float64).unsqueeze(1).requires_grad_()
    u = net.columns.derivatives.perceptron(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (bend,) = torch.autograd.grad(slope.sum(), x)
    jet = net.jet(net(x))
    torch.testing.assert_close(jet.value, u, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(jet.first[:, 0], slope, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(jet.second[:, 0], bend, rtol=1e-10, atol=1e-12)


def test_derivatives_that_k_fac_can_not_see_are_refused(dde, capsys):
    with pytest.raises(UnsupportedModelError, match=r"derivatives that dde\.grad takes"):
        integration.kfac(dde.nn.FNN([1, 8, 1], "tanh", "Glorot uniform"))
    net = network()
    model = poisson(dde, lambda x, y: dde.grad.hessian(y, x), net)
    model.compile(integration.kfac(net), loss=integration.squared_error)
    with pytest.raises(RuntimeError, match=r"does not require grad|not to have been used"):
        model.train(iterations=1)
    net.apply_output_transform(lambda x, y: x * y)
    with pytest.raises(UnsupportedModelError, match="no feature or output transform"):
        net(torch.zeros(1, 1, dtype=torch.float64))
