"""Ten ordinary problems: small networks on data that scikit-learn ships or that is generated in a moment.

None was chosen by how K-FAC does on it. Depths run from 1 to 6 hidden layers, mini-batches from 32 cases
to all of them; initial parameters are PyTorch's own. A third of the cases, always the same, is held
out; inputs, and the targets of regressions, are standardised by the other two thirds.
"""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn import datasets
from torch import Tensor, nn

from kronfac_experiments.race.problem import (
    ERROR,
    Metric,
    Problem,
    Split,
    misclassified,
    misclassified_by_sign,
    squared_error,
)
from kronfac_experiments.task import Cases

Loss = Callable[[], nn.Module]
"""A class of `torch.nn`."""
HELD_OUT = 3
"""One in so many cases is for validation."""
SPLIT_SEED = 0
Table = npt.NDArray[Any]
Load = Callable[[], tuple[Table, Table]]


def _network(
    table: Load,
    hidden: tuple[int, ...],
    activation: type[nn.Module],
    loss: Loss,
) -> nn.Module:
    """A perceptron with PyTorch's own initial parameters."""
    train = _split(table, loss).train
    classes = loss is nn.CrossEntropyLoss
    outputs = int(train.targets.max()) + 1 if classes else train.targets.shape[1]
    modules: list[nn.Module] = []
    for inputs, out in pairwise((train.inputs.shape[1], *hidden, outputs)):
        modules += [nn.Linear(inputs, out), activation()]
    return nn.Sequential(*modules[:-1])


def _problem(
    name: str,
    about: str,
    table: Load,
    hidden: tuple[int, ...],
    activation: type[nn.Module],
    loss: Loss,
    batch: int | None,
) -> Problem:
    widths = "-".join(map(str, hidden))
    metrics: dict[Loss, tuple[Metric, str]] = {
        nn.CrossEntropyLoss: (misclassified, ERROR),
        nn.BCEWithLogitsLoss: (misclassified_by_sign, ERROR),
        nn.MSELoss: (squared_error, "squared error"),
    }
    return Problem(
        name,
        f"{about}; hidden layers {widths}, {activation.__name__}, {loss.__name__}, "
        + (f"mini-batches of {batch}" if batch else "full batch"),
        lambda: _split(table, loss),
        lambda: _network(table, hidden, activation, loss),
        loss,
        *metrics[loss],
        batches=(batch,),
        judged_by="training",
    )


@cache
def _split(table: Load, loss: Loss) -> Split:
    inputs, targets = table()
    order = np.random.default_rng(SPLIT_SEED).permutation(len(inputs))
    held_out = len(order) // HELD_OUT
    validation, train = order[:held_out], order[held_out:]
    x = _standardised(inputs, train)
    if loss is nn.CrossEntropyLoss:
        y = torch.from_numpy(targets.astype(np.int64))
    elif loss is nn.BCEWithLogitsLoss:
        y = torch.from_numpy(targets.astype(np.float32))[:, None]
    else:
        y = _standardised(targets.reshape(len(targets), -1), train)
    return Split(Cases(x[train], y[train]), Cases(x[validation], y[validation]))


def _standardised(values: Table, train: npt.NDArray[np.int64]) -> Tensor:
    """Mean 0 and deviation 1 on the training cases; what is constant there is only shifted."""
    deviation = values[train].std(axis=0)
    scaled = (values - values[train].mean(axis=0)) / np.where(deviation > 0, deviation, 1)
    return torch.from_numpy(scaled.astype(np.float32))


# ----------------------------------------------------------------------------------------------- data


def _bunch(load: Callable[..., Any]) -> Load:
    def table() -> tuple[Table, Table]:
        inputs, targets = load(return_X_y=True)
        return inputs, targets

    return table


_digits = _bunch(datasets.load_digits)


def _digit_images() -> tuple[Table, Table]:
    images, _ = _digits()
    return images, images


def _friedman() -> tuple[Table, Table]:
    inputs, targets = datasets.make_friedman1(3000, n_features=10, noise=1.0, random_state=0)
    return inputs, targets


def two_spirals(cases: int = 600, turns: float = 1.75, noise: float = 0.02) -> tuple[Table, Table]:
    """Two arms around each other, half of the cases on each, with noise on the coordinates."""
    rng = np.random.default_rng(0)
    classes = np.arange(cases) % 2
    radius = np.sqrt(rng.uniform(0.02, 1, cases))  # as dense outside as inside
    angle = 2 * np.pi * turns * radius + np.pi * classes
    points = radius * np.stack([np.cos(angle), np.sin(angle)])
    return points.T + noise * rng.standard_normal((cases, 2)), classes


# ------------------------------------------------------------------------------------------- problems

SMALL = (
    _problem(
        "digits", "handwritten digits, 8 × 8 pixels",
        _digits, (128,), nn.ReLU, nn.CrossEntropyLoss, 32,
    ),
    _problem(
        "digits-deep", "the same digits",
        _digits, (64, 64, 64, 64), nn.Tanh, nn.CrossEntropyLoss, 128,
    ),
    _problem(
        "autoencoder", "the same digits as their own targets",
        _digit_images, (128, 64, 16, 64, 128), nn.SiLU, nn.MSELoss, 256,
    ),
    _problem(
        "cancer", "malignant or benign by 30 measures of cell nuclei",
        _bunch(datasets.load_breast_cancer), (64, 64), nn.Sigmoid, nn.BCEWithLogitsLoss, None,
    ),
    _problem(
        "wine", "three growers by 13 chemical measures",
        _bunch(datasets.load_wine), (32,), nn.Tanh, nn.CrossEntropyLoss, None,
    ),
    _problem(
        "iris", "three species by 4 measures of flowers",
        _bunch(datasets.load_iris), (16, 16, 16), nn.GELU, nn.CrossEntropyLoss, 32,
    ),
    _problem(
        "diabetes", "progression of the disease by 10 measures of a patient",
        _bunch(datasets.load_diabetes), (64, 64), nn.ReLU, nn.MSELoss, 64,
    ),
    _problem(
        "linnerud", "3 measures of the body by 3 exercises, 20 people",
        _bunch(datasets.load_linnerud), (32, 32), nn.Tanh, nn.MSELoss, None,
    ),
    _problem(
        "friedman", "Friedman's first function of 5 of 10 variables, with noise",
        _friedman, (50, 50, 50), nn.GELU, nn.MSELoss, 512,
    ),
    _problem(
        "spirals", "two spirals around each other",
        two_spirals, (20, 20, 20, 20, 20, 20), nn.Tanh, nn.BCEWithLogitsLoss, None,
    ),
)  # fmt: skip
