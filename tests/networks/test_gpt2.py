"""GPT-2: what a step sees of it. That it trains is in test_weak_blocks.py."""

import pytest
import torch
from torch.nn import functional

from tests.networks.gpt2 import gpt2
from tests.networks.training import PADDING, VOCABULARY, assert_moved, padded, tokens, train


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_the_loss_inside_the_model_with_padding(tied, training):
    model, batch = gpt2(tied=tied).train(training), padded(tokens(4))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses, events = train(model, lambda: model(**batch).loss, 5)
    assert losses[-1] < losses[0]
    assert events <= {"rejected"}
    assert_moved(model, before)


def test_inside_and_outside_the_loss_is_the_same():
    """Labels that are ignored, a shift as the model does it, a reshape: the same steps."""
    batch = padded(tokens(4))
    labels = batch.pop("labels")
    following = functional.pad(labels, (0, 1), value=PADDING)[:, 1:].reshape(-1)
    runs = []
    for inside in (True, False):
        torch.manual_seed(1)
        model = gpt2().eval()

        def loss(model=model, inside=inside):
            if inside:
                return model(**batch, labels=labels).loss
            logits = model(**batch).logits.reshape(-1, VOCABULARY)
            return functional.cross_entropy(logits, following)

        runs.append(train(model, loss, 4)[0])
    assert runs[0] == pytest.approx(runs[1], rel=1e-3)
