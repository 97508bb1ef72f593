"""Networks that need blocks for the layers that most of their parameters are in."""

import pytest
from torch.nn import functional

from tests.networks.gpt2 import gpt2
from tests.networks.resnet import resnet
from tests.networks.training import assert_trains, images, padded, tokens


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_gpt2_with_padding(tied, training):
    model, batch = gpt2(tied=tied).train(training), padded(tokens(8))
    assert_trains(model, lambda: model(**batch).loss)


@pytest.mark.slow
def test_a_resnet_with_batch_norm():
    """With eight images its last stage would normalise over eight numbers, a loss that is hardly smooth."""
    model, (x, y) = resnet().train(), images(32, 32)
    assert_trains(model, lambda: functional.cross_entropy(model(x), y))
