"""Six networks that are no chains of linear layers, with their data, losses and validation metrics.

MNIST's first 50,000 training images are for training and the other 10,000 for validation; its test set
is not looked at. Initial parameters are PyTorch's own, but for GPT. Evaluations are on fixed parts of
the data, evenly spread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import torch
from sklearn import datasets
from torch import Tensor, nn

from kronfac import Bernoulli
from kronfac_experiments.bench.race.networks import models
from kronfac_experiments.data.mnist import mnist
from kronfac_experiments.data.shakespeare import shakespeare
from kronfac_experiments.task import Cases

MNIST_TRAIN = 50_000
CONTEXT = 64
"""Characters that a language model sees."""
FEATURES, CLASSES = 40, 10
TABLE_TRAIN, TABLE_VALIDATION = 40_000, 10_000
ALL = "networks"
"""Stands for all of them on the command line."""


@dataclass(frozen=True)
class Split:
    """The examples of a problem: float32, or int64 for classes and characters."""

    train: Cases
    validation: Cases


Metric = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets of some examples to a value for each of them."""


@dataclass(frozen=True)
class NetworkProblem:
    """A network, data and a loss.

    Args:
        name: On the command line.
        about: Data and network, in words.
        load: Its examples.
        build: The network, from the random numbers of the global generator.
        loss: A mean over examples.
        metric: What validation is measured by, lower is better.
        metric_name: With its unit.
        batch: Examples in a mini-batch of first-order methods.
        kfac_batch: The same for K-FAC, to which noise is dearer than examples.
        evaluated: Examples for the training loss and for validation.
        loss_scale: Size of the loss over that of one class's cross-entropy, for SGD's rates.
        clip: Largest norm of a first-order method's gradient, as is the custom for language models.
    """

    name: str
    about: str
    load: Callable[[], Split]
    build: Callable[[], nn.Module]
    loss: Callable[[], nn.Module]
    metric: Metric
    metric_name: str
    batch: int
    kfac_batch: int
    evaluated: tuple[int, int]
    loss_scale: float = 1.0
    clip: float | None = None

    @cached_property
    def split(self) -> Split:
        """Its examples, read once."""
        return self.load()

    def make_model(self, seed: int) -> nn.Module:
        """The network of a seed, in training mode; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.make_model(0).parameters())


def spread_out(cases: Cases, count: int) -> Cases:
    """`count` examples at equal distances: a text changes from play to play."""
    rows = torch.linspace(0, len(cases) - 1, min(count, len(cases))).round().long()
    inputs = cases.inputs[rows]
    same = cases.targets is cases.inputs
    return Cases(inputs, inputs if same else cases.targets[rows])


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


# -------------------------------------------------------------------------------------------- metrics


def misclassified(outputs: Tensor, targets: Tensor) -> Tensor:
    """100 or 0 for each example or place: outputs (N, C, …), classes (N, …)."""
    return 100.0 * (outputs.argmax(dim=1) != targets).double()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖σ(z) − y‖² of each example, as [MG15 §13] reports it."""
    return (outputs.sigmoid() - targets).double().square().sum(dim=1)


# ------------------------------------------------------------------------------------------- problems

ERROR = "error, %"
NETWORKS = {
    problem.name: problem
    for problem in (
        NetworkProblem(
            "cnn",
            "MNIST; two convolutions with pooling, two linear layers",
            _digits, models.cnn, nn.CrossEntropyLoss, misclassified, ERROR,
            batch=128, kfac_batch=512, evaluated=(1000, 4000),
        ),
        NetworkProblem(
            "resnet",
            "MNIST; three residual blocks of 8, 16 and 32 channels with BatchNorm",
            _digits, models.resnet, nn.CrossEntropyLoss, misclassified, ERROR,
            batch=128, kfac_batch=256, evaluated=(1000, 3000),
        ),
        NetworkProblem(
            "conv_autoencoder",
            "MNIST; convolutions to 30 numbers and transposed convolutions back; cross-entropy of "
            "the pixels, summed",
            _digit_images, models.conv_autoencoder, Bernoulli, squared_error, "squared error",
            batch=128, kfac_batch=512, evaluated=(1000, 1000), loss_scale=100.0,
        ),
        NetworkProblem(
            "gpt",
            f"tiny Shakespeare, {CONTEXT} characters; GPT of 4 layers, width 128, 4 heads",
            _text, lambda: models.GPT(_symbols(), CONTEXT), nn.CrossEntropyLoss, misclassified, ERROR,
            batch=32, kfac_batch=64, evaluated=(64, 192), clip=1.0,
        ),
        NetworkProblem(
            "lstm",
            f"tiny Shakespeare, {CONTEXT} characters; one LSTM layer of width 256",
            _text, lambda: models.LSTMLanguageModel(_symbols()), nn.CrossEntropyLoss, misclassified,
            ERROR, batch=32, kfac_batch=128, evaluated=(64, 192), clip=1.0,
        ),
        NetworkProblem(
            "tabular",
            f"scikit-learn's make_classification, {FEATURES} features, {CLASSES} classes of 8 "
            "clusters; three hidden layers of 256 with LayerNorm and dropout 0.1",
            _table, lambda: models.tabular(FEATURES, CLASSES), nn.CrossEntropyLoss, misclassified,
            ERROR, batch=128, kfac_batch=1024, evaluated=(2000, 5000),
        ),
    )
}  # fmt: skip


def networks_named(names: tuple[str, ...]) -> tuple[NetworkProblem, ...]:
    """Those named, in their order; all for `networks`.

    Raises:
        ValueError: a name is of no network.
    """
    for name in names:
        if name not in (ALL, *NETWORKS):
            raise ValueError(f"--problems are of {ALL}, {', '.join(NETWORKS)}; got {name!r}.")
    return tuple(p for name, p in NETWORKS.items() if ALL in names or name in names)
