"""A ResNet with BatchNorm in `train()`: what a step leaves behind. In `eval()` it trains today."""

import pytest
import torch
from torch.nn import functional

from tests.networks.resnet import resnet
from tests.networks.training import assert_moved, assert_trains, images, train


def test_running_statistics_are_as_after_one_forward_pass_per_step():
    torch.manual_seed(0)
    model, (x, y) = resnet().train(), images(8, 32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, events = train(model, lambda: functional.cross_entropy(model(x), y), 5)
    assert losses[-1] < losses[0]
    assert events <= {"rejected"}
    assert_moved(model, before)
    counts = {int(b) for name, b in model.named_buffers() if name.endswith("num_batches_tracked")}
    assert len(counts) == 1
    assert counts <= {5, 6}  # a rejected step calls the closure again


@pytest.mark.slow
def test_with_running_statistics():
    model, (x, y) = resnet().eval(), images(16, 32)
    assert_trains(model, lambda: functional.cross_entropy(model(x), y))
