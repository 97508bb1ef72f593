"""The exact Fisher against its definition."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac import Bernoulli, Categorical, Gaussian
from kronfac.errors import TargetError, UnsupportedModelError
from kronfac_experiments.diagnostics import TooLargeError, exact_fisher
from tests.conftest import ALGEBRA, LIKELIHOODS, mlp, normal
from tests.reference import dense

WIDTHS = (3, 4, 2, 3)


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("likelihood", list(LIKELIHOODS))
def test_equals_the_definition(likelihood, chunk):
    model, x = mlp(WIDTHS), normal(11, 3, seed=3)
    F = exact_fisher(model, LIKELIHOODS[likelihood](), x, chunk=chunk)
    assert_close(F.dense, dense.exact_fisher(model, x, likelihood), **ALGEBRA)
    assert torch.equal(F.dense, F.dense.mT)
    assert F.names == ("0", "2", "4")
    assert F.sizes == (16, 10, 9)


@pytest.mark.parametrize(
    ("loss", "likelihood", "variance", "scale"),
    [
        (Gaussian(variance=0.3), "gaussian", 0.3, 1.0),
        (nn.MSELoss(), "gaussian", 0.5, 1 / 3),
        (nn.MSELoss(reduction="sum"), "gaussian", 0.5, 11.0),
        (nn.BCEWithLogitsLoss(), "bernoulli", 1.0, 1 / 3),
        (nn.CrossEntropyLoss(reduction="sum"), "categorical", 1.0, 11.0),
        (nn.CrossEntropyLoss(label_smoothing=0.2), "categorical", 1.0, 1.0),
    ],
    ids=str,
)
def test_has_the_units_of_the_objective(loss, likelihood, variance, scale):
    model, x = mlp(WIDTHS), normal(11, 3, seed=3)
    expected = dense.exact_fisher(model, x, likelihood, variance, scale)
    assert_close(exact_fisher(model, loss, x, chunk=5).dense, expected, **ALGEBRA)


def test_of_some_layers_is_a_part_of_the_whole():
    model, x = mlp(WIDTHS), normal(7, 3)
    whole = exact_fisher(model, Categorical(), x)
    part = exact_fisher(model, Categorical(), x, layers=["4", "0"])
    assert part.names == ("4", "0")
    for i, k in enumerate((2, 0)):
        for j, m in enumerate((2, 0)):
            assert_close(part.block(i, j), whole.block(k, m), **ALGEBRA)


def test_layers_without_bias_and_with_relu():
    model, x = mlp(WIDTHS, "relu", bias=False), normal(9, 3)
    assert_close(
        exact_fisher(model, Bernoulli(), x).dense,
        dense.exact_fisher(model, x, "bernoulli"),
        **ALGEBRA,
    )


def test_a_float32_model_is_evaluated_in_float64_and_left_alone():
    model = mlp(WIDTHS, dtype=torch.float32)
    x = normal(9, 3, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    F = exact_fisher(model, Categorical(), x)
    assert F.dense.dtype == torch.float64
    expected = dense.exact_fisher(
        mlp(WIDTHS, dtype=torch.float32).double(), x.double(), "categorical"
    )
    assert_close(F.dense, expected, **ALGEBRA)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert value.dtype == torch.float32
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


class TwoInputs(nn.Module):
    """Not a chain, with two inputs, layers registered in another order than they are used."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(4, 2), nn.Linear(3, 4)

    def forward(self, x, shift):
        return self.last(torch.tanh(self.first(x)) + shift) + x[:, :2]


def test_any_model_that_kfac_accepts():
    model = TwoInputs().double()
    x, shift = normal(6, 3), normal(6, 4, seed=1)
    F = exact_fisher(model, Gaussian(), (x, shift))
    J = []
    for row in range(6):
        for output in model(x[row : row + 1], shift[row : row + 1])[0]:
            grads = torch.autograd.grad(output, [*model.parameters()], retain_graph=True)
            joined = [
                torch.cat([w, b[:, None]], 1) for w, b in zip(grads[::2], grads[1::2], strict=True)
            ]
            J.append(dense.flatten(joined))
    J = torch.stack(J)
    assert F.names == ("last", "first")
    assert_close(F.dense, J.mT @ J / 6, **ALGEBRA)


def test_refuses_what_would_not_fit():
    model = nn.Sequential(nn.Linear(784, 1000), nn.Sigmoid(), nn.Linear(1000, 10))
    x = torch.zeros(3, 784)
    with pytest.raises(TooLargeError, match=r"20,\d{3}\.\d GB: 2 layers with 795,010 weights"):
        exact_fisher(model, Categorical(), x)
    with pytest.raises(TooLargeError, match="Choose fewer layers"):
        exact_fisher(mlp(WIDTHS), Categorical(), normal(3, 3), max_gigabytes=1e-6)


def test_refuses_what_makes_no_sense():
    model, x = mlp(WIDTHS), normal(5, 3)
    with pytest.raises(ValueError, match=r"trains the layers \['0', '2', '4'\]; got \['1'\]"):
        exact_fisher(model, Categorical(), x, layers=["0", "1"])
    for layers in ([], ["0", "0"], "0"):
        with pytest.raises(ValueError, match="list of different names"):
            exact_fisher(model, Categorical(), x, layers=layers)
    with pytest.raises(ValueError, match="at least one case"):
        exact_fisher(model, Categorical(), x[:0])
    with pytest.raises(ValueError, match="chunk is a number of cases"):
        exact_fisher(model, Categorical(), x, chunk=0)
    with pytest.raises(UnsupportedModelError, match="dropout masks"):
        exact_fisher(nn.Sequential(nn.Dropout(0.5), model), Categorical(), x)
    with pytest.raises(UnsupportedModelError, match="returned a tuple"):
        exact_fisher(TwoOutputs(), Categorical(), x)
    with pytest.raises(TargetError, match="Categorical needs"):
        exact_fisher(nn.Sequential(model, nn.Unflatten(1, (3, 1))), Categorical(), x)


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        return self.layer(x), x
