"""δᵀFδ by the loss's own Hessian, against the Fisher by its definition."""

from itertools import pairwise

import pytest
import torch
from torch import nn

from tests.conftest import mlp, normal
from tests.reference import dense, gauss_newton

LOSSES: dict[str, tuple[nn.Module, dict[str, object]]] = {
    "mse": (nn.MSELoss(), {"likelihood": "gaussian", "variance": 0.5, "scale": 1 / 3}),
    "mse, summed": (
        nn.MSELoss(reduction="sum"),
        {"likelihood": "gaussian", "variance": 0.5, "scale": 7.0},
    ),
    "bce": (nn.BCEWithLogitsLoss(), {"likelihood": "bernoulli", "scale": 1 / 3}),
    "cross entropy": (nn.CrossEntropyLoss(), {"likelihood": "categorical"}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_it_is_the_exact_fisher_for_one_term_per_example(name):
    loss, fisher = LOSSES[name]
    model, x, y = mlp([4, 5, 3]), normal(7, 4), normal(7, 3, seed=1).softmax(dim=1)
    theta = gauss_newton.parameters(model)
    delta = {name: normal(*p.shape, seed=2) for name, p in theta.items()}
    ours = gauss_newton.curvature(model, theta, lambda f: f(x), lambda z: loss(z, y), delta)
    matrices = [
        torch.cat([weight, bias[:, None]], dim=1)
        for weight, bias in [*pairwise(delta.values())][::2]
    ]
    v = dense.flatten(matrices)
    truth = float(v @ dense.exact_fisher(model, x, **fisher) @ v)
    assert abs(ours - truth) <= 1e-10 * truth
