"""Every method is its definition, written densely in float64."""

import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from kronfac import WhitenedMomentum
from kronfac.linalg.polar import polar
from kronfac.whitened_momentum import InputFactors
from tests.everyday import dense

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
EVERY_STEP = InputFactors(interval=1, rows=None)


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (6, 6), (1, 4), (3, 7, 4)])
def test_the_polar_factor_is_that_of_the_polynomials(shape):
    M = torch.randn(shape, dtype=torch.float64)
    expected = torch.stack([dense.polar(each) for each in M.reshape(-1, *shape[-2:])])
    torch.testing.assert_close(polar(M), expected.reshape(shape), **CLOSE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_singular_values_from_a_thousandth_on_become_about_one(dtype, scale):
    U, V = (torch.linalg.qr(torch.randn(n, 40, dtype=torch.float64))[0] for n in (60, 40))
    s = torch.logspace(0, -2.6, 40, dtype=torch.float64)
    assert (s / s.norm()).min() >= 1e-3
    M = (U @ torch.diag(s * scale) @ V.mT).to(dtype)
    factor = (U.mT @ polar(M).double() @ V).diagonal()
    assert factor.min() > 0.8
    assert factor.max() < 1.2


def test_the_polar_factor_of_zero_is_zero():
    assert torch.equal(polar(torch.zeros(2, 3)), torch.zeros(2, 3))


def network() -> nn.Sequential:
    torch.manual_seed(1)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def batches(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(2)
    return [(torch.randn(20, 6).double(), torch.randn(20, 3).double()) for _ in range(count)]


@pytest.mark.parametrize("method", ["polar", "whitened"])
@pytest.mark.parametrize("inputs", [EVERY_STEP, None])
def test_a_step_is_the_definition(method, inputs):
    model = network()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = WhitenedMomentum(model, 0.03, weight_decay=0.2, method=method, inputs=inputs)
    gradients, seen = dense.train(model, optimizer, batches(), functional.mse_loss)
    for name, p in model.named_parameters():
        truth = (
            dense.Weight(start[name], method, 0.03, 0.2)
            if p.dim() > 1
            else dense.Adam(start[name], 0.03, 0.0)
        )
        # A is averaged in every step; inverses cost at most a tenth of the layer on 20 examples.
        cost = (2 if method == "polar" else 25) * p.shape[-1] ** 3
        every = max(2, math.ceil(cost / (0.1 * 6 * p.numel() * 20)))
        for k in range(len(gradients)):
            if inputs is not None and p.dim() > 1:
                before = truth.inverse
                truth.sample(seen[k][name.removesuffix(".weight")])
                due = k % every == 0 or (k < every and k & (k - 1) == 0)
                truth.inverse = truth.inverse if due else before
            truth.step(gradients[k][name])
        torch.testing.assert_close(p.detach(), truth.W, **CLOSE)


def test_a_sample_has_evenly_spaced_rows_and_other_ones_later():
    model = network()
    optimizer = WhitenedMomentum(model, inputs=InputFactors(interval=1, rows=5), method="polar")
    _, seen = dense.train(model, optimizer, batches(2), functional.mse_loss)
    rows = [seen[0]["0"][0::4], seen[1]["0"][1::4]]
    A = sum(a.mT @ a / len(a) for a in rows) / 2
    torch.testing.assert_close(optimizer.state[model[0].weight]["A"][0], A, **CLOSE)


def test_what_auto_chooses():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 16)
            self.narrow, self.wide = nn.Linear(16, 16), nn.Linear(16, 256)
            self.down, self.norm = nn.Linear(256, 256), nn.LayerNorm(256)
            self.heads = nn.ModuleList([nn.Linear(256, 4), nn.Linear(256, 4)])
            self.unused = nn.Linear(3, 3)

        def forward(self, i):
            x = self.norm(self.down(self.wide(self.narrow(self.table(i))).tanh()))
            return {
                "first": self.heads[0](x).flatten(1),
                "others": [self.heads[1](x).log_softmax(1)],
            }

    model = Model()
    plan = model, WhitenedMomentum(model).plan(torch.arange(200) % 10)
    methods = {row.name: row.method for row in plan[1].rows}
    assert methods["narrow.weight"] == methods["wide.weight"] == "polar"
    assert methods["down.weight"] == "whitened"
    rest = {name for name, method in methods.items() if method == "adam"}
    assert rest == methods.keys() - {"narrow.weight", "wide.weight", "down.weight"}
    reasons = {row.name: row.why for row in plan[1].rows}
    assert reasons["table.weight"] == "an embedding"
    assert reasons["heads.0.weight"] == reasons["heads.1.weight"] == "the last layer"
    assert reasons["unused.weight"] == "no products with it were seen"
    assert reasons["norm.weight"] == "not a matrix"
    assert "State: " in str(plan[1])
    with torch.device("meta"):  # where a model of any size fits
        assert WhitenedMomentum(Model()).plan(torch.arange(200) % 10) == plan[1]


def test_the_rate_of_steps_rises_and_falls_to_zero():
    model = network()
    optimizer = WhitenedMomentum(model, 0.5, steps=100)
    x, y = batches(1)[0]
    rates = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        for _ in range(102):
            functional.mse_loss(model(x), y).backward()
            optimizer.step()
            rates.append(optimizer.report.lr[0])
    (over,) = given
    assert "given steps=100, which are over" in str(over.message)
    expected = [0.25, 0.495, *(0.5 * (1 - k / 100) for k in range(2, 100)), 0.0, 0.0]
    assert rates == pytest.approx(expected)


def test_the_rate_of_seconds_goes_by_the_clock(monkeypatch):
    clock = iter([10.0, 12.0, 15.0, 30.0])
    monkeypatch.setattr("kronfac.whitened_momentum.time.monotonic", lambda: next(clock))
    model = network()
    optimizer = WhitenedMomentum(model, 1.0, seconds=10)
    x, y = batches(1)[0]
    rates = []
    for _ in range(4):
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        rates.append(optimizer.report.lr[0])
    assert rates == pytest.approx([0.05, 0.8, 0.5, 0.0])
