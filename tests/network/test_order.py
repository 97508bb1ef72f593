"""Views of all examples after one another, and tables that are no examples."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac.curvature.taps import gradients_of_examples
from kronfac.linearization import Traced
from kronfac.network import record
from kronfac.network.discovery import discover
from tests.conftest import AUTODIFF, network_of, normal, seeded

N = 4


class Pairs(nn.Module):
    """Two views of every example through one trunk, in one call of it."""

    def __init__(self, trunk: nn.Module, how: str) -> None:
        super().__init__()
        self.trunk, self.how = trunk, how

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        za, zb = self.trunk(JOINS[self.how](a, b)).flatten(1).chunk(2)
        return za * zb + za


JOINS = {
    "cat": lambda a, b: torch.cat([a, b]),
    "cat, dim by name": lambda a, b: torch.cat(tensors=[a, b], dim=0),
    "stacked and flattened": lambda a, b: torch.stack([a, b]).flatten(0, 1),
    "stacked and reshaped": lambda a, b: torch.tanh(torch.stack((a, b), 0)).reshape(
        -1, *a.shape[1:]
    ),
    "repeated": lambda a, b: a.repeat(2, *[1] * (a.dim() - 1)) + torch.cat((b, 2 * b)),
}
TRUNKS = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (3,)),
    "sequences of N": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (N, 3)),
    "norms": (lambda: nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 2), nn.PReLU()), (2, 3)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 2), nn.Tanh(), nn.Conv1d(4, 4, 2, groups=2)),
        (2, 5),
    ),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 4, 0.0, batch_first=True), (3, 4)),
}


def assert_gradients_of_examples(model: nn.Module, *given: Tensor) -> None:
    """Those that taps give are those of passes over one example each."""
    model = model.double()
    network = network_of(model)
    with record(model, network.objective) as recording:
        z = model(*given)
        functional.mse_loss(z, torch.zeros_like(z)).backward()
    (part,) = recording.batch().passes
    network = discover(network, part)
    view = Traced(network, part)
    (outputs,) = view.outputs
    r = normal(*outputs.shape, seed=9)
    for unit, taps in zip(network.units, view.taps([r]), strict=True):
        found = torch.cat(list(gradients_of_examples(taps)))
        expected = []
        for n in range(N):
            z = model(*(x[n : n + 1] for x in given))
            grads = torch.autograd.grad(
                z, unit.parameters, r.reshape(N, *z.shape[1:])[n : n + 1], retain_graph=True
            )
            expected.append(unit.join(grads))
        if len(found) == 1:  # summed over the examples
            expected = [torch.stack(expected).sum(dim=0)]
        assert_close(found, torch.stack(expected), **AUTODIFF, msg=f"{unit.names}")


@pytest.mark.parametrize("how", JOINS)
@pytest.mark.parametrize("name", TRUNKS)
def test_two_views_of_every_example(name, how):
    torch.manual_seed(0)
    build, shape = TRUNKS[name]
    a, b = normal(N, *shape), normal(N, *shape, seed=1)
    assert_gradients_of_examples(Pairs(build(), how), a, b)


def test_views_of_what_is_looked_up():
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.out = nn.Embedding(6, 3), nn.Linear(3, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            za, zb = self.out(self.table(torch.cat([a, b]))).chunk(2)
            return za * zb

    torch.manual_seed(0)
    a, b = (torch.randint(6, (N,), generator=seeded(n)) for n in range(2))
    assert_gradients_of_examples(Lookup(), a, b)


def test_joined_features_are_no_views():
    """Along another dimension; and of other numbers of rows."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.out = nn.Linear(3, 4), nn.Linear(8, 2)

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            places = torch.stack([a, b], dim=1).flatten(0, 1)  # (examples · 2, …)
            return self.out(torch.tanh(self.first(places)).view(len(a), 8))

    torch.manual_seed(0)
    assert_gradients_of_examples(Joined(), normal(N, 3), normal(N, 3, seed=1))


class Positions(nn.Module):
    """As many positions as examples, or twice as many, looked up once for all examples."""

    def __init__(self, length: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("numbers", torch.arange(16).view(1, -1))
        self.table, self.mix, self.out = nn.Embedding(16, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        places = LOOKUPS[self.how](self, x)
        return self.out(torch.tanh(x + self.mix(self.table(places)))).flatten(1)


LOOKUPS = {
    "arange": lambda model, x: torch.arange(x.shape[1]),
    "a row of them": lambda model, x: torch.arange(x.shape[1]).unsqueeze(0) + 1,
    "a buffer": lambda model, x: model.numbers[:, : x.shape[1]],
    "for every example": lambda model, x: torch.arange(x.shape[1]).expand(len(x), -1),
}


@pytest.mark.parametrize("length", [N, 2 * N, 3])
@pytest.mark.parametrize("how", LOOKUPS)
def test_a_table_of_positions_is_no_batch_of_examples(how, length):
    torch.manual_seed(0)
    model = Positions(length, how)
    assert_gradients_of_examples(model, normal(N, length, 3))
