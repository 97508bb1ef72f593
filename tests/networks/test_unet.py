"""A U-Net as it is usually written: a class for every pixel, transposed convolutions, skip connections.

Libraries that have one are larger than all else that the tests install.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.networks.training import FEW, assert_trains


def block(d_in: int, d_out: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for d in (d_in, d_out):
        layers += [nn.Conv2d(d, d_out, 3, padding=1), nn.BatchNorm2d(d_out), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    def __init__(self, width: int = 4):
        super().__init__()
        self.down = nn.ModuleList([block(3, width), block(width, 2 * width)])
        self.middle = block(2 * width, 4 * width)
        self.grow = nn.ModuleList(
            [
                nn.ConvTranspose2d(4 * width, 2 * width, 2, 2),
                nn.ConvTranspose2d(2 * width, width, 2, 2),
            ]
        )
        self.up = nn.ModuleList([block(4 * width, 2 * width), block(2 * width, width)])
        self.head = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        skipped = []
        for down in self.down:
            x = down(x)
            skipped.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x)
        for grow, up in zip(self.grow, self.up, strict=True):
            x = up(torch.cat([skipped.pop(), grow(x)], dim=1))
        return self.head(x)


def discs(examples: int, size: int = 16):
    """Bright discs in noise; a frame that is ignored."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    centre = torch.randint(size // 4, 3 * size // 4, (examples, 2, 1, 1))
    squared = (y - centre[:, 0]) ** 2 + (x - centre[:, 1]) ** 2
    labels = (squared < 16).long() + (squared < 4).long()
    image = torch.randn(examples, 3, size, size)
    image[:, 0] += 2 * labels
    labels[:, :1] = 255
    return image, labels


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_classes_of_pixels(training):
    model, (x, y) = UNet().train(training), discs(4)
    steps = FEW if training else 2 * FEW
    assert_trains(model, lambda: functional.cross_entropy(model(x), y, ignore_index=255), steps)


@pytest.mark.slow
def test_a_wider_one():
    model, (x, y) = UNet(8).train(), discs(8, 32)
    assert_trains(model, lambda: functional.cross_entropy(model(x), y, ignore_index=255))
