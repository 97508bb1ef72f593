"""Vision transformers of transformers and timm: a patch convolution, a class token, position embeddings."""

import pytest
from torch.nn import functional

from tests.networks.libraries import timm, transformers
from tests.networks.training import CLASSES, FEW, assert_trains, images


def vit(width: int = 32, size: int = 16, dropout: float = 0.0):
    config = transformers().ViTConfig(
        image_size=size,
        patch_size=4,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=CLASSES,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return transformers().ViTForImageClassification(config)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_loss_inside_the_model(dropout):
    model, (x, y) = vit(dropout=dropout).train(), images(8)
    assert_trains(model, lambda: model(pixel_values=x, labels=y).loss, FEW)


def test_the_loss_outside_the_model():
    model, (x, y) = vit().eval(), images(8)
    assert_trains(model, lambda: functional.cross_entropy(model(x).logits, y), FEW)


@pytest.mark.slow
def test_one_of_timm():
    model = timm().create_model(
        "vit_tiny_patch16_224",
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=2, num_classes=CLASSES,
    )  # fmt: skip
    x, y = images(32, 32)
    assert_trains(model.train(), lambda: functional.cross_entropy(model(x), y))
