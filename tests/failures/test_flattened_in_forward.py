"""Tokens flattened inside `forward`: more rows come out of the model than go in."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import KFAC, Intervals
from tests.conftest import normal, seeded
from tests.failures.steps import FIXED, assert_right_curvature, closure_of, flat

EXAMPLES, PLACES, CLASSES = 8, 5, 3
# All examples are the same one, so that every subset of them has the same curvature; places differ.
X = normal(1, PLACES, 4).expand(EXAMPLES, -1, -1).contiguous()
Y = torch.randint(CLASSES, (1, PLACES), generator=seeded(1)).expand(EXAMPLES, -1).reshape(-1)


class Flattening(nn.Module):
    """(examples, places, features) in, (examples · places, classes) out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 6, dtype=torch.float64)
        self.out = nn.Linear(6, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x.reshape(-1, 4))))


class Plain(Flattening):
    """The same for rows that were flattened before."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def stepped(model: nn.Module, x: Tensor, **settings: object) -> Tensor:
    """The parameters after two steps."""
    loss = nn.CrossEntropyLoss()
    optimizer = KFAC(model, loss, **FIXED | {"fisher": "exact"} | settings)  # nothing is drawn
    for _ in range(2):
        optimizer.step(closure_of(optimizer, lambda model: loss(model(x), Y)))
    return flat(model)


@pytest.mark.parametrize("fraction", [0.3, 0.45])
def test_the_curvature_on_a_part_of_the_examples(fraction):
    loss = nn.CrossEntropyLoss()
    settings = {"intervals": Intervals(fraction, fraction), "fisher": "exact"}
    optimizer = KFAC(Flattening(), loss, **FIXED | settings)
    assert_right_curvature(optimizer, lambda f: f(X), lambda z: loss(z, Y))


@pytest.mark.parametrize("fraction", [0.3, 0.45])
def test_the_step_from_a_part_of_the_examples_is_that_from_all(fraction):
    """Which it is, all of them being the same: only their statistics could be wrong."""
    ours = stepped(Flattening(), X, intervals=Intervals(fraction, fraction))
    assert_close(ours, stepped(Plain(), X.reshape(-1, 4)), rtol=1e-9, atol=1e-11)


def test_an_argument_is_per_example_by_what_it_says_and_not_by_its_length():
    """A mask over the features, as long as the mini-batch by coincidence, is no argument per example."""

    class Masked(Plain):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x * mask)

    x, mask = normal(1, 4, seed=2).expand(4, -1).contiguous(), normal(4, seed=3)
    y = torch.zeros(4, dtype=torch.long)
    loss = nn.CrossEntropyLoss()
    settings = FIXED | {"intervals": Intervals(0.5, 0.5)}
    optimizer = KFAC(Masked(), loss, **settings)
    assert_right_curvature(optimizer, lambda f: f(x, mask), lambda z: loss(z, y))
