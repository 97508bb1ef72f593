"""Sequences with time first, of as many places as there are examples: no size tells them apart."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac import KFAC, Blocks, FixedDamping, FixedGamma, QuadraticModel
from kronfac.network.by_example import by_example, sum_to_shape
from tests.conftest import normal
from tests.layers.kinds import perturbed

WORDS = 6


class Sequences(nn.Module):
    """A network in which every place depends on those before it, with time first or examples first."""

    def __init__(self, time: int) -> None:
        super().__init__()
        self.time = time
        self.table, self.norm = nn.Embedding(WORDS, 3), nn.LayerNorm(3)
        self.inner, self.out = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        h = self.norm(self.table(x)).cumsum(dim=self.time)
        return self.out(torch.tanh(self.inner(h)) * self.scale)


def changes(time: int, words: torch.Tensor, targets: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """By how much two steps change the outputs, (steps, examples, time, 2)."""
    torch.manual_seed(0)
    model, loss = perturbed(Sequences(time).double()), nn.MSELoss()
    optimizer = KFAC(
        model,
        loss,
        fisher="exact",
        damping=FixedDamping(0.1),
        gamma=FixedGamma(0.3),
        step_size=QuadraticModel(),
        acceptance=None,
        statistics_fraction=1.0,
        fisher_fraction=1.0,
        blocks=blocks,
    )
    x, y = (t.transpose(0, 1) if time == 0 else t for t in (words, targets))

    def closure():
        optimizer.zero_grad()
        with torch.enable_grad():
            h = loss(model(x).reshape(-1, 2), y.reshape(-1, 2))
            h.backward()
        return h

    outputs = [model(x).detach()]
    for _ in range(2):
        optimizer.step(closure)
        outputs.append(model(x).detach())
    found = torch.stack(outputs).diff(dim=0)
    return found.transpose(1, 2) if time == 0 else found


@pytest.mark.parametrize("length", [4, 8, 3])
@pytest.mark.parametrize("blocks", [Blocks(), Blocks("reduce", 0)], ids=["default", "reduce"])
def test_the_step_does_not_depend_on_which_comes_first(blocks, length):
    generator = torch.Generator().manual_seed(4)
    words, targets = torch.randint(WORDS, (4, length), generator=generator), normal(4, length, 2)
    first, second = (changes(time, words, targets, blocks) for time in (1, 0))
    assert_close(second, first, rtol=0, atol=1e-6 * float(first.abs().max()))


def test_the_dimension_that_the_examples_are_along_is_tried_first():
    x = normal(4, 4, 3)
    assert_close(by_example(x, 4), x)
    assert_close(by_example(x, 4, first=1), x.transpose(0, 1))
    assert_close(by_example(x.flatten(0, 1), 4, first=1), x.transpose(0, 1))  # interleaved
    assert_close(by_example(x[:, 0], 4, first=1), x[:, :1])
    assert_close(sum_to_shape(x, torch.Size([3]), 4), x.sum(dim=1))
    assert_close(sum_to_shape(x, torch.Size([3]), 4, first=1), x.sum(dim=0))
    flat = x.flatten(0, 1)
    assert_close(sum_to_shape(flat, torch.Size([3]), 4, first=1), x.sum(dim=0))
    assert_close(sum_to_shape(flat, torch.Size([3]), 4), x.sum(dim=1))
