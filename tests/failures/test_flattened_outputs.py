"""Tokens and pixels: the loss call defines the terms, one softmax each, not the model's output."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from tests.conftest import normal, seeded
from tests.failures.steps import FIXED, assert_right_curvature

EXAMPLES, PLACES, CLASSES = 6, 4, 3


class Places(nn.Module):
    """Logits (examples, places, classes), from Linear layers on vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 6, dtype=torch.float64)
        self.out = nn.Linear(6, PLACES * CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x))).reshape(-1, PLACES, CLASSES)


class Image(Places):
    """The same as an image, (examples, classes, 2, 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mT.reshape(-1, CLASSES, 2, 2)


class Shared(nn.Module):
    """The same from Linear layers that every place of (examples, places, features) goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, 6, dtype=torch.float64)
        self.out = nn.Linear(6, CLASSES, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.hidden(x)))


def rows_of_shared(model: Callable[..., Tensor]) -> Tensor:
    return model(SEQUENCES).reshape(-1, CLASSES)


def rows_of_tokens(model: Callable[..., Tensor]) -> Tensor:
    return model(X).reshape(-1, CLASSES)


def rows_of_pixels(model: Callable[..., Tensor]) -> Tensor:
    return model(X).permute(0, 2, 3, 1).reshape(-1, CLASSES)


X = normal(EXAMPLES, 5)
SEQUENCES = normal(EXAMPLES, PLACES, 5, seed=3)
HARD = torch.randint(CLASSES, (EXAMPLES * PLACES,), generator=seeded(1))
SOFT = normal(EXAMPLES * PLACES, CLASSES, seed=2).softmax(dim=1)
SOME_IGNORED = HARD.clone()
SOME_IGNORED[::5] = -100
WEIGHT = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)

LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "hard targets": (nn.CrossEntropyLoss(), HARD),
    "hard targets, summed": (nn.CrossEntropyLoss(reduction="sum"), HARD),
    "soft targets": (nn.CrossEntropyLoss(), SOFT),
    "soft targets, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), SOFT),
    "ignore_index": (nn.CrossEntropyLoss(), SOME_IGNORED),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHT), HARD),
    "class weights, soft": (nn.CrossEntropyLoss(weight=WEIGHT), SOFT),
    "class weights, ignore_index": (nn.CrossEntropyLoss(weight=WEIGHT), SOME_IGNORED),
}
VIEWS = {
    "tokens": (Places, rows_of_tokens),
    "pixels": (Image, rows_of_pixels),
    "shared weights": (Shared, rows_of_shared),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("view", VIEWS)
def test_every_row_that_the_loss_was_called_with_is_a_term_of_its_own(view, loss):
    (make, rows), (module, targets) = VIEWS[view], LOSSES[loss]
    optimizer = KFAC(make(), module, **FIXED)
    assert_right_curvature(optimizer, rows, lambda z: module(z, targets))


@pytest.mark.parametrize("loss", ["hard targets", "ignore_index", "class weights"])
def test_classes_in_the_second_of_four_dimensions(loss):
    module, targets = LOSSES[loss]
    optimizer = KFAC(Image(), module, **FIXED)
    shaped = targets.reshape(EXAMPLES, 2, 2)
    assert_right_curvature(optimizer, lambda f: f(X), lambda z: module(z, shaped))
