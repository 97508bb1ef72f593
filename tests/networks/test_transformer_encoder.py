"""torch's own `nn.TransformerEncoder`: packed projections, and a fused path in `eval()`."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.networks.training import CLASSES, FEW, VOCABULARY, assert_trains, padded, tokens


class Classifier(nn.Module):
    def __init__(self, width: int = 32, length: int = 10, norm_first: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, ids, padding=None):
        h = self.encoder(self.embedding(ids) + self.position, src_key_padding_mask=padding)
        return self.head(h[:, 0])


@pytest.mark.parametrize("norm_first", [False, True], ids=["post-norm", "pre-norm"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_classifier(norm_first, training):
    model, ids = Classifier(norm_first=norm_first).train(training), tokens(8)
    y = torch.arange(8) % CLASSES
    assert_trains(model, lambda: functional.cross_entropy(model(ids), y), FEW)


def test_padding():
    model, batch = Classifier().train(), padded(tokens(8))
    y, padding = torch.arange(8) % CLASSES, batch["attention_mask"] == 0
    ids = batch["input_ids"]
    assert_trains(model, lambda: functional.cross_entropy(model(ids, padding=padding), y), FEW)


@pytest.mark.slow
def test_a_wider_one():
    model, ids = Classifier(64, 16).train(), tokens(64, 16)
    y = torch.arange(64) % CLASSES
    assert_trains(model, lambda: functional.cross_entropy(model(ids), y))
