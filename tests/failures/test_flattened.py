"""Tokens and pixels: the loss call defines the terms, one softmax each, not the model's output.

The curvature along a few steps is the dense one, also if tokens are flattened inside `forward`: then more
rows come out of the model than go in.
"""

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, Intervals
from tests.conftest import normal, seeded
from tests.failures.steps import FIXED, assert_right_curvature

EXAMPLES, PLACES, CLASSES = 6, 4, 3
X = normal(EXAMPLES, PLACES, 5)
HARD = torch.randint(CLASSES, (EXAMPLES * PLACES,), generator=seeded(1))
SOFT = normal(EXAMPLES * PLACES, CLASSES, seed=2).softmax(dim=1)
SOME_IGNORED = HARD.clone()
SOME_IGNORED[::5] = -100
WEIGHT = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)


class Shared(nn.Module):
    """Logits (examples, places, classes), from Linear layers that every place goes through."""

    places = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(5, 6, dtype=torch.float64)
        self.out = nn.Linear(6, self.places * CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


class Places(Shared):
    """Logits (examples, places, classes), from Linear layers on vectors."""

    places = PLACES

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0]).reshape(-1, PLACES, CLASSES)


class Image(Places):
    """Logits (examples, classes, 2, 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mT.reshape(-1, CLASSES, 2, 2)


class Flattening(Shared):
    """Logits (examples · places, classes)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 5))


def as_rows(z: Tensor) -> Tensor:
    return z.reshape(-1, CLASSES)


def pixels_as_rows(z: Tensor) -> Tensor:
    return as_rows(z.permute(0, 2, 3, 1))


VIEWS = {
    "tokens": (Places, as_rows),
    "pixels": (Image, pixels_as_rows),
    "shared weights": (Shared, as_rows),
    "flattened in forward": (Flattening, as_rows),
}
LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "hard targets, summed": (nn.CrossEntropyLoss(reduction="sum"), HARD),
    "soft targets, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), SOFT),
    "class weights, soft": (nn.CrossEntropyLoss(weight=WEIGHT), SOFT),
    "class weights, ignore_index": (nn.CrossEntropyLoss(weight=WEIGHT), SOME_IGNORED),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("view", VIEWS)
def test_every_row_that_the_loss_was_called_with_is_a_term_of_its_own(view, loss):
    (make, rows), (module, targets) = VIEWS[view], LOSSES[loss]
    optimizer = KFAC(make(), module, **FIXED)
    assert_right_curvature(optimizer, lambda f: rows(f(X)), lambda z: module(z, targets))


@pytest.mark.parametrize("loss", ["hard targets, summed", "class weights, ignore_index"])
def test_classes_in_the_second_of_four_dimensions(loss):
    module, targets = LOSSES[loss]
    shaped = targets.reshape(EXAMPLES, 2, 2)
    optimizer = KFAC(Image(), module, **FIXED)
    assert_right_curvature(optimizer, lambda f: f(X), lambda z: module(z, shaped))


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_a_part_of_the_examples_has_all_of_its_places(fraction):
    """All examples are the same one, so that every subset of them has the same curvature."""
    x, y = X[:1].expand(EXAMPLES, -1, -1).contiguous(), HARD[:PLACES].repeat(EXAMPLES)
    loss = nn.CrossEntropyLoss()
    settings = {"intervals": Intervals(fraction, fraction), "fisher": "exact"}
    optimizer = KFAC(Flattening(), loss, **FIXED | settings)
    assert_right_curvature(optimizer, lambda f: f(x), lambda z: loss(z, y))


def test_an_argument_that_is_as_long_as_the_mini_batch_by_coincidence():
    """A mask over the features of examples that are all the same one."""

    class Masked(Shared):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return super().forward(x * mask)

    x, mask = X[:1, 0].expand(5, -1).contiguous(), normal(5, seed=3)
    y, loss = torch.zeros(5, dtype=torch.long), nn.CrossEntropyLoss()
    optimizer = KFAC(Masked(), loss, **FIXED | {"intervals": Intervals(0.5, 0.5)})
    assert_right_curvature(optimizer, lambda f: f(x, mask), lambda z: loss(z, y))
