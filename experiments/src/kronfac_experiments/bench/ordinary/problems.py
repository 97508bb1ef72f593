"""Ten ordinary problems: small networks on data that scikit-learn ships or that is generated in a moment.

None was chosen by how K-FAC does on it. Depths run from 1 to 6 hidden layers, mini-batches from 32 cases
to all of them; initial parameters are PyTorch's own. A third of the cases, always the same, is held
out; inputs, and the targets of regressions, are standardised by the other two thirds.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn import datasets
from torch import Tensor, nn

from kronfac_experiments.task import Cases

HELD_OUT = 3
"""One in so many cases is for validation."""
SPLIT_SEED = 0
Table = npt.NDArray[Any]


@dataclass(frozen=True)
class Split:
    """The cases of a problem, float32; classes are int64."""

    train: Cases
    validation: Cases


@dataclass(frozen=True)
class Problem:
    """A network, a loss and data.

    Args:
        name: For the command line.
        about: The data, in words.
        table: Inputs (cases, d) and targets, (cases,) or (cases, outputs), as they come.
        hidden: Widths of the hidden layers.
        activation: Activation of all of them.
        loss: `CrossEntropyLoss`, `BCEWithLogitsLoss` or `MSELoss`.
        batch: Cases in a mini-batch; None for all.
    """

    name: str
    about: str
    table: Callable[[], tuple[Table, Table]]
    hidden: tuple[int, ...]
    activation: type[nn.Module]
    loss: type[nn.Module]
    batch: int | None

    @cached_property
    def split(self) -> Split:
        """Its cases, always the same."""
        return _split(*self.table(), self.loss)

    def make_loss(self) -> nn.Module:
        """The loss, averaged over cases."""
        return self.loss()

    def make_model(self, seed: int) -> nn.Sequential:
        """The network with PyTorch's own initial parameters; the global generator is left alone."""
        modules: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for inputs, outputs in pairwise(self.layers):
                modules += [nn.Linear(inputs, outputs), self.activation()]
        return nn.Sequential(*modules[:-1])

    @property
    def layers(self) -> tuple[int, ...]:
        """Widths, from the inputs to the outputs."""
        train = self.split.train
        classes = self.loss is nn.CrossEntropyLoss
        outputs = int(train.targets.max()) + 1 if classes else train.targets.shape[1]
        return (train.inputs.shape[1], *self.hidden, outputs)

    @property
    def batch_size(self) -> int:
        """Cases in a mini-batch but the last of an epoch."""
        return self.batch or len(self.split.train)

    @property
    def error_name(self) -> str:
        """What `error` is in."""
        return "mean squared error" if self.loss is nn.MSELoss else "% misclassified"

    @torch.no_grad()
    def training_loss(self, model: nn.Module) -> float:
        """Over all training cases, from float32 outputs in float64.

        In float32 the cross-entropy of a case is a multiple of 1e-7 once it is that small.
        """
        cases = self.split.train
        outputs = model(cases.inputs).double()
        targets = cases.targets.double() if cases.targets.is_floating_point() else cases.targets
        return float(self.make_loss()(outputs, targets))

    @torch.no_grad()
    def error(self, model: nn.Module, cases: Cases) -> float:
        """Per cent of cases misclassified, or the mean squared error of standardised targets."""
        outputs: Tensor = model(cases.inputs)
        if not outputs.isfinite().all():
            return math.nan
        if self.loss is nn.MSELoss:
            return float((outputs - cases.targets).double().square().mean())
        classes = outputs.argmax(dim=1) if self.loss is nn.CrossEntropyLoss else outputs > 0
        return 100 * float((classes != cases.targets).double().mean())

    @property
    def description(self) -> str:
        """In a line."""
        widths = "-".join(map(str, self.layers))
        batch = f"mini-batches of {self.batch}" if self.batch else "full batch"
        return f"{self.about}; {widths}, {self.activation.__name__}, {self.loss.__name__}, {batch}"


def _split(inputs: Table, targets: Table, loss: type[nn.Module]) -> Split:
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


def _bunch(load: Callable[..., Any]) -> Callable[[], tuple[Table, Table]]:
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

_ALL = (
    Problem(
        "digits", "handwritten digits, 8 × 8 pixels",
        _digits, (128,), nn.ReLU, nn.CrossEntropyLoss, 32,
    ),
    Problem(
        "digits-deep", "the same digits",
        _digits, (64, 64, 64, 64), nn.Tanh, nn.CrossEntropyLoss, 128,
    ),
    Problem(
        "autoencoder", "the same digits as their own targets",
        _digit_images, (128, 64, 16, 64, 128), nn.SiLU, nn.MSELoss, 256,
    ),
    Problem(
        "cancer", "malignant or benign by 30 measures of cell nuclei",
        _bunch(datasets.load_breast_cancer), (64, 64), nn.Sigmoid, nn.BCEWithLogitsLoss, None,
    ),
    Problem(
        "wine", "three growers by 13 chemical measures",
        _bunch(datasets.load_wine), (32,), nn.Tanh, nn.CrossEntropyLoss, None,
    ),
    Problem(
        "iris", "three species by 4 measures of flowers",
        _bunch(datasets.load_iris), (16, 16, 16), nn.GELU, nn.CrossEntropyLoss, 32,
    ),
    Problem(
        "diabetes", "progression of the disease by 10 measures of a patient",
        _bunch(datasets.load_diabetes), (64, 64), nn.ReLU, nn.MSELoss, 64,
    ),
    Problem(
        "linnerud", "3 measures of the body by 3 exercises, 20 people",
        _bunch(datasets.load_linnerud), (32, 32), nn.Tanh, nn.MSELoss, None,
    ),
    Problem(
        "friedman", "Friedman's first function of 5 of 10 variables, with noise",
        _friedman, (50, 50, 50), nn.GELU, nn.MSELoss, 512,
    ),
    Problem(
        "spirals", "two spirals around each other",
        two_spirals, (20, 20, 20, 20, 20, 20), nn.Tanh, nn.BCEWithLogitsLoss, None,
    ),
)  # fmt: skip
PROBLEMS = {problem.name: problem for problem in _ALL}


def problems_named(names: Sequence[str]) -> tuple[Problem, ...]:
    """These, in the order of the table; all for none.

    Raises:
        ValueError: there is no such problem.
    """
    for name in names:
        if name not in PROBLEMS:
            raise ValueError(f"--problems are of {', '.join(PROBLEMS)}; got {name!r}.")
    return tuple(problem for problem in _ALL if not names or problem.name in names)
