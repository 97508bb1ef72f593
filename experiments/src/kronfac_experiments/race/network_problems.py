"""Ten networks that are no chains of linear layers, with their data.

The last 10,000 of MNIST's training images are for validation, and 10 of the 40 people of the Olivetti
faces; MNIST's test set is not looked at. Initial parameters are PyTorch's own, but for the GPTs.
Evaluations are on fixed parts of the data, evenly spread.
"""

from functools import cache

import numpy as np
import torch
from sklearn import datasets
from torch import nn

from kronfac import Bernoulli
from kronfac_experiments.data.faces import olivetti_images
from kronfac_experiments.data.mnist import mnist
from kronfac_experiments.data.shakespeare import shakespeare
from kronfac_experiments.race import models
from kronfac_experiments.race.problem import (
    ERROR,
    Problem,
    Split,
    misclassified,
    pixel_error,
    squared_error,
)
from kronfac_experiments.task import Cases

MNIST_TRAIN = 50_000
CONTEXT = 64
"""Characters that a language model sees."""
FEATURES, CLASSES = 40, 10
TABLE_TRAIN, TABLE_VALIDATION = 40_000, 10_000
FACES_TRAIN = 300
"""Photographs of the first 30 people."""
NOISE = 0.2
"""Standard deviation of the noise on the faces, whose pixels are in [0, 1]."""


# ----------------------------------------------------------------------------------------------- data


@cache
def _digits() -> Split:
    images, labels = mnist().train
    pictures = images.view(-1, 1, 28, 28)
    parts = slice(MNIST_TRAIN), slice(MNIST_TRAIN, None)
    return Split(*(Cases(pictures[part], labels[part]) for part in parts))


def _digit_images() -> Split:
    digits = _digits()
    parts = (part.inputs for part in (digits.train, digits.validation))
    return Split(*(Cases(images, images.flatten(1)) for images in parts))


@cache
def _text() -> Split:
    text = shakespeare(CONTEXT)
    return Split(Cases(*text.train), Cases(*text.validation))


def _symbols() -> int:
    return int(_text().train.inputs.max()) + 1


@cache
def _table() -> Split:
    inputs, classes = datasets.make_classification(
        TABLE_TRAIN + TABLE_VALIDATION,
        n_features=FEATURES,
        n_informative=20,
        n_redundant=10,
        n_classes=CLASSES,
        n_clusters_per_class=8,
        flip_y=0.01,
        random_state=0,
    )
    train = inputs[:TABLE_TRAIN]
    scaled = (inputs - train.mean(axis=0)) / train.std(axis=0)
    x, y = torch.from_numpy(scaled.astype(np.float32)), torch.from_numpy(classes.astype(np.int64))
    parts = slice(TABLE_TRAIN), slice(TABLE_TRAIN, None)
    return Split(*(Cases(x[part], y[part]) for part in parts))


@cache
def _noisy_faces() -> Split:
    """Noisy halves of photographs, (N, 1, 32, 64), and the photographs' own."""
    images = olivetti_images().view(-1, 1, 32, 64)
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    parts = slice(2 * FACES_TRAIN), slice(2 * FACES_TRAIN, None)
    return Split(*(Cases((images + NOISE * noise)[part], images[part]) for part in parts))


# ------------------------------------------------------------------------------------------- problems

_TEXT = f"tiny Shakespeare, {CONTEXT} characters"
NETWORKS = (
    Problem(
        "cnn",
        "MNIST; two convolutions with pooling, two linear layers",
        _digits, models.cnn, nn.CrossEntropyLoss, misclassified, ERROR,
        batches=(128, 512), evaluated=(1000, 4000),
    ),
    Problem(
        "resnet",
        "MNIST; three residual blocks of 8, 16 and 32 channels with BatchNorm",
        _digits, models.resnet, nn.CrossEntropyLoss, misclassified, ERROR,
        batches=(128, 256), evaluated=(1000, 3000),
    ),
    Problem(
        "conv_autoencoder",
        "MNIST; convolutions to 30 numbers and transposed convolutions back; cross-entropy of the "
        "pixels, summed",
        _digit_images, models.conv_autoencoder, Bernoulli, pixel_error, "squared error",
        batches=(128, 512), evaluated=(1000, 1000), loss_scale=100.0,
    ),
    Problem(
        "gpt",
        f"{_TEXT}; GPT of 4 layers, width 128, 4 heads",
        _text, lambda: models.GPT(_symbols(), CONTEXT), nn.CrossEntropyLoss, misclassified, ERROR,
        batches=(32, 16, 64), evaluated=(64, 192), clip=1.0,
    ),
    Problem(
        "lstm",
        f"{_TEXT}; one LSTM layer of width 256",
        _text, lambda: models.RecurrentLanguageModel(nn.LSTM, _symbols()), nn.CrossEntropyLoss,
        misclassified, ERROR, batches=(32, 128), evaluated=(64, 192), clip=1.0,
    ),
    Problem(
        "tabular",
        f"scikit-learn's make_classification, {FEATURES} features, {CLASSES} classes of 8 clusters; three "
        "hidden layers of 256 with LayerNorm and dropout 0.1",
        _table, lambda: models.tabular(FEATURES, CLASSES), nn.CrossEntropyLoss, misclassified, ERROR,
        batches=(128, 1024), evaluated=(2000, 5000),
    ),
    Problem(
        "vit",
        "MNIST; 49 patches of 4 × 4 pixels, transformer of 4 layers, width 64, 4 heads",
        _digits, models.ViT, nn.CrossEntropyLoss, misclassified, ERROR,
        batches=(128, 512), evaluated=(1000, 2000),
    ),
    Problem(
        "gru",
        f"{_TEXT}; one GRU layer of width 256",
        _text, lambda: models.RecurrentLanguageModel(nn.GRU, _symbols()), nn.CrossEntropyLoss,
        misclassified, ERROR, batches=(32, 128), evaluated=(64, 192), clip=1.0,
    ),
    Problem(
        "unet",
        f"halves of the Olivetti faces with noise of deviation {NOISE:g}; a U-Net of three scales",
        _noisy_faces, models.UNet, nn.MSELoss, squared_error, "squared error",
        batches=(16, 64), evaluated=(100, 200), loss_scale=0.01,
    ),
    Problem(
        "tied_gpt",
        f"{_TEXT}; the GPT with its head tied to the embedding",
        _text, lambda: models.GPT(_symbols(), CONTEXT, tied=True), nn.CrossEntropyLoss, misclassified,
        ERROR, batches=(32, 16, 64), evaluated=(64, 192), clip=1.0,
    ),
)  # fmt: skip
