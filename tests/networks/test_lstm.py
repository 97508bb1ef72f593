"""An LSTM language model as it is usually written: embedding, two layers with dropout, head."""

import pytest
from torch import nn
from torch.nn import functional

from tests.networks.training import FEW, VOCABULARY, assert_trains, tokens


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        h, _ = self.lstm(self.embedding(ids))
        return self.head(h)


def next_token_loss(model, ids):
    return functional.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_next_tokens(training):
    model, ids = LanguageModel().train(training), tokens(4)
    assert_trains(model, lambda: next_token_loss(model, ids), FEW)


@pytest.mark.slow
def test_a_wider_one():
    model, ids = LanguageModel(64).train(), tokens(32, 16)
    assert_trains(model, lambda: next_token_loss(model, ids))
