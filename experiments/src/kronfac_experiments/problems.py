"""The three deep autoencoders of [MG15 §13] and the small classifier of [MG15 §3].

The problems are those of Hinton and Salakhutdinov (2006), as the authors' program sets them up:
logistic hidden units, a linear code layer, sparse initialisation. Models end in a linear layer,
and the output non-linearity is part of the loss. Data is (cases, pixels), input and target alike.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from kronfac_experiments.data.curves import curves
from kronfac_experiments.data.faces import faces
from kronfac_experiments.data.mnist import mnist
from kronfac_experiments.training import sparse_

Loss = Literal["bernoulli", "gaussian"]

CLASSIFIER_LAYERS = (256, 20, 20, 20, 20, 20, 10)


@dataclass(frozen=True)
class Problem:
    """An autoencoder and its objective.

    Args:
        name: What `load` and `PROBLEMS` know it by.
        layers: Widths from input to output; the one in the middle is the code.
        loss: `bernoulli`: outputs are logits, cross-entropy summed over pixels; `gaussian`: outputs
            are the reconstruction, half the squared error. Averaged over cases.
        weight_decay: η of the term η/2 ‖θ‖², biases included.
        train_cases: Number of training cases that `load` gives.
        test_cases: Number of test cases that `load` gives.
    """

    name: str
    layers: tuple[int, ...]
    loss: Loss
    weight_decay: float
    train_cases: int
    test_cases: int

    @property
    def code_layer(self) -> int:
        """The index, from 0, of the linear layer whose outputs are the code."""
        return len(self.layers) // 2 - 1

    @property
    def parameters(self) -> int:
        """The number of weights and biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in pairwise(self.layers))


def _mirrored(*encoder: int) -> tuple[int, ...]:
    return encoder + encoder[-2::-1]


CURVES = Problem(
    name="curves",
    layers=_mirrored(784, 400, 200, 100, 50, 25, 6),
    loss="bernoulli",
    weight_decay=1e-5,
    train_cases=20_000,
    test_cases=10_000,
)
MNIST = Problem(
    name="mnist",
    layers=_mirrored(784, 1000, 500, 250, 30),
    loss="bernoulli",
    weight_decay=1e-5,
    train_cases=60_000,
    test_cases=10_000,
)
FACES = Problem(
    name="faces",
    layers=_mirrored(625, 2000, 1000, 500, 30),
    loss="gaussian",
    weight_decay=5e-6,
    train_cases=103_500,
    test_cases=41_400,
)
PROBLEMS = {problem.name: problem for problem in (CURVES, MNIST, FACES)}


def load(name: str) -> tuple[Tensor, Tensor]:
    """The training and the test cases of the problem of that name.

    MNIST and the photographs of FACES are downloaded when they are not on the machine; CURVES and
    the patches of FACES are generated, in seconds, and always the same.
    """
    if name == "mnist":
        images = mnist()
        return images.train.images, images.test.images
    if name == "faces":
        patches = faces()
        return patches.train, patches.test
    train, test = curves(CURVES.train_cases + CURVES.test_cases).split(
        [CURVES.train_cases, CURVES.test_cases]
    )
    return train, test


def build_model(problem: Problem, seed: int) -> nn.Sequential:
    """The autoencoder, sparsely initialised; the global generator is left alone."""
    modules: list[nn.Module] = []
    for index, layer in enumerate(_linear_layers(problem.layers)):
        modules.append(layer)
        if index not in (problem.code_layer, len(problem.layers) - 2):
            modules.append(nn.Sigmoid())
    model = nn.Sequential(*modules)
    sparse_(model, torch.Generator().manual_seed(seed))
    return model


def classifier_model(seed: int) -> nn.Sequential:
    """The 256-20-20-20-20-20-10 tanh network of [MG15 §3], for `mnist_16x16`; outputs are logits.

    The paper does not say how it was initialised. Here it is Glorot and Bengio's (2010) uniform
    initialisation, which was made for tanh: W ~ U(−r, r), r = √(6 / (in + out)), biases 0.
    """
    generator = torch.Generator().manual_seed(seed)
    modules: list[nn.Module] = []
    for layer in _linear_layers(CLASSIFIER_LAYERS):
        nn.init.xavier_uniform_(layer.weight, generator=generator)
        nn.init.zeros_(layer.bias)
        modules += [layer, nn.Tanh()]
    return nn.Sequential(*modules[:-1])


def _linear_layers(widths: tuple[int, ...]) -> list[nn.Linear]:
    """Layers with memory for parameters but no values: no draw from the global generator."""
    layers = []
    for inputs, outputs in pairwise(widths):
        layer = nn.utils.skip_init(nn.Linear, inputs, outputs)
        assert isinstance(layer, nn.Linear)
        layers.append(layer)
    return layers


@torch.no_grad()
def classification_error(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    """Per cent of the cases whose largest output is not that of the label."""
    return 100 * int((model(x).argmax(dim=1) != labels).sum()) / len(x)


@torch.no_grad()
def reconstruction_error(
    model: nn.Module, x: Tensor, chunk: int = 5000, *, problem: Problem
) -> float:
    """The squared error that the figures of [MG15 §13] show: ‖r(x) − x‖², averaged over cases.

    r is the logistic function of the outputs for a `bernoulli` loss and the outputs themselves
    for a `gaussian` one. Summed over pixels, without a factor ½.

    Args:
        model: What `build_model(problem, …)` gives, or its average.
        x: (cases, pixels).
        chunk: Cases at a time, to bound the memory.
        problem: Says what the outputs mean.
    """
    total = 0.0
    for part in x.split(chunk):
        outputs = model(part)
        reconstruction = outputs.sigmoid() if problem.loss == "bernoulli" else outputs
        # A sum over all of MNIST is too long for float32.
        total += (reconstruction - part).square().sum(dtype=torch.float64).item()
    return total / len(x)
