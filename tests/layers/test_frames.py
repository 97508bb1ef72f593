"""Convolutions of more images than there are examples, or fewer: frames, views, parts of a mini-batch."""

import pytest
import torch
from torch import Tensor, nn

from kronfac import Blocks
from tests.conftest import normal
from tests.layers.kit import train

N, FRAMES, CHANNELS, CLASSES = 6, 3, 2, 3
LAYERS = {
    "convolution": lambda: nn.Conv1d(CHANNELS, 4, 3),
    "without a bias": lambda: nn.Conv1d(CHANNELS, 4, 3, bias=False),
    "in groups": lambda: nn.Conv1d(CHANNELS, 4, 3, groups=2),
    "transposed": lambda: nn.ConvTranspose1d(CHANNELS, 4, 3, stride=2),
    "transposed, in groups": lambda: nn.ConvTranspose1d(CHANNELS, 4, 3, groups=2),
}
each_layer = pytest.mark.parametrize("layer", LAYERS)


class Video(nn.Module):
    """The frames of every example as images of their own, and then their mean."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:  # (examples, frames, channels, length)
        h = torch.tanh(self.layer(x.flatten(0, 1))).mean(dim=-1)
        return self.out(h.unflatten(0, x.shape[:2]).mean(dim=1))


class SomeExamples(Video):
    """Only some examples go through the layer, as in a mixture of experts."""

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, 0]
        chosen = x[:, 0, 0] > 0
        h = torch.zeros(len(x), 4, dtype=x.dtype)
        return self.out(h.index_put((chosen,), self.layer(x[chosen]).tanh().mean(dim=-1)))


class Unbatched(Video):
    """The examples are the places of one image."""

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(x[:, 0, :, 0].mT))[:, : len(x)].mT)


@each_layer
@pytest.mark.parametrize(
    ("kind", "blocks"),
    [
        (Video, Blocks()),
        (Video, Blocks(dense_limit=0)),
        (Video, Blocks("reduce", 0)),
        (SomeExamples, Blocks()),
    ],
    ids=str,
)
def test_they_train(kind, layer, blocks):
    torch.manual_seed(0)
    model = kind(LAYERS[layer]()).double()
    x, y = normal(N, FRAMES, CHANNELS, 7), torch.arange(N) % CLASSES
    _, losses = train(model, nn.CrossEntropyLoss(), x, y, blocks=blocks)
    assert losses[-1] < losses[0]


def test_examples_along_the_length_of_one_image():
    torch.manual_seed(0)
    model = Unbatched(nn.Conv1d(CHANNELS, 4, 3, padding=1)).double()
    x, y = normal(N, 1, CHANNELS, 1), torch.arange(N) % CLASSES
    _, losses = train(model, nn.CrossEntropyLoss(), x, y)
    assert losses[-1] < losses[0]
