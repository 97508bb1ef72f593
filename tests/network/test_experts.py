"""Mixtures of experts by torch's product of groups, which has no forward-mode derivative and no float64."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kronfac.linearize import Traced
from kronfac.record import record
from tests.conftest import network_of, normal, seeded

product = getattr(functional, "grouped_mm", None)
pytestmark = pytest.mark.skipif(product is None, reason="this torch has no product of groups")

WIDTH, CLASSES = 4, 3
X, Y = normal(24, WIDTH), torch.randint(CLASSES, (24,), generator=seeded(3))


class Experts(nn.Module):
    """Three experts, two for each example; in double precision by the definition: a matrix for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, CLASSES)
        self.experts = nn.Parameter(torch.randn(3, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shares, chosen = self.router(x).softmax(dim=1).topk(2)
        expert, order = chosen.reshape(-1).sort()
        rows, ends = x[order // 2], torch.bincount(expert, minlength=3).cumsum(0)
        if x.dtype == torch.float64:
            outputs = (rows[:, None] @ self.experts[expert])[:, 0]
        else:
            outputs = product(rows, self.experts, offs=ends.int())
        weighed = outputs * shares.reshape(-1)[order, None]
        return self.head(torch.zeros_like(x).index_add(0, order // 2, weighed).tanh())


@pytest.mark.parametrize("seed", range(3))
def test_products_with_the_jacobian(seed):
    """By finite differences, in float32, within 1 % of those of the definition in float64."""
    torch.manual_seed(seed)
    truth = Experts().double()
    v = {name: normal(*p.shape, seed=seed) for name, p in truth.named_parameters()}
    expected = 0.0
    for name, p in truth.named_parameters():
        z = truth(X)
        J = [torch.autograd.grad(y, p, retain_graph=True)[0].reshape(-1) for y in z.reshape(-1)]
        expected += (torch.stack(J) @ v[name].reshape(-1)).reshape(z.shape)

    model = copy.deepcopy(truth).float()
    network = network_of(model, nn.CrossEntropyLoss())
    with record(model, network.objective) as recording:
        functional.cross_entropy(model(X.float()), Y).backward()
    (part,) = recording.batch().passes
    direction = tuple(unit.join([v[n].float() for n in unit.names]) for unit in network.units)
    (found,) = Traced(network, part).jvp([direction])
    assert not network.learned.forward_mode
    assert (found[0].double() - expected).norm() < 1e-2 * expected.norm()
