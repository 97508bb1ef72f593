"""Mixtures of experts, which are called with the examples that are sent to them: some, or none."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac import KFAC, Blocks
from kronfac.errors import UnsupportedModelError
from tests.conftest import normal

EXPERTS = {
    "linear": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 4)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 3, padding=1), nn.Flatten()
    ),
    "in groups": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 3, padding=1, groups=2), nn.Flatten()
    ),
}


class Mixture(nn.Module):
    """Every example goes to one expert, and to the last one only if it is open."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.gate, self.last = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 2)
        self.experts = nn.ModuleList(EXPERTS[kind]() for _ in range(3))
        self.register_buffer("closed", torch.tensor([0.0, 0.0, 100.0]))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        weight, chosen = (self.gate(h) - self.closed).softmax(dim=-1).max(dim=-1)
        y = torch.zeros_like(h)
        for n, expert in enumerate(self.experts):
            sent = chosen == n
            y = y.index_put((sent,), expert(h[sent]) * weight[sent].unsqueeze(1))
        return self.last(h + y)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"inverse": "ekfac"},
        {"inverse": "block_tridiagonal"},
        {"blocks": Blocks(dense_limit=0)},
        {"fisher": "exact"},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", EXPERTS)
def test_an_expert_that_is_called_with_no_example(kind, settings):
    torch.manual_seed(0)
    model = Mixture(kind).double()
    x, y = normal(16, 3), torch.arange(16) % 2
    optimizer = KFAC(model, nn.CrossEntropyLoss(), **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    losses = []
    for step in range(6):
        if step == 3:
            model.closed.zero_()
        losses.append(float(optimizer.step(closure).detach()))
        assert optimizer.report is not None
        assert not optimizer.report.refused
    assert losses[2] < losses[0]
    assert losses[5] < losses[3]
    assert all(unit.observed for unit in optimizer.network.units)


def test_reduce_needs_the_examples_of_every_use():
    model, loss = Mixture("linear").double(), nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss, blocks=Blocks("reduce", 0))
    with pytest.raises(UnsupportedModelError, match=r"experts.*Use Blocks\(sharing=\"expand\"\)"):
        optimizer.step(optimizer.closure(normal(16, 3), torch.arange(16) % 2))
