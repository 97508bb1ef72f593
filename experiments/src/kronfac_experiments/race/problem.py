"""What a contestant trains: data, a network, a loss, and what validation is measured by."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kronfac_experiments.task import Cases

EVALUATED_AT_A_TIME = 500
Batch = tuple[Tensor, ...]
Metric = Callable[[Tensor, Tensor], Tensor]
"""From outputs and targets to a value for each example."""


@dataclass(frozen=True)
class Split:
    """The examples of a problem: float32, or int64 for classes and characters."""

    train: Cases
    validation: Cases


@dataclass(frozen=True, eq=False)
class Problem:
    """A network, data and a loss.

    Args:
        name: On the command line.
        about: Data and network, in words.
        load: Its examples.
        build: The network, from the random numbers of the global generator.
        loss: A mean over examples.
        metric: What validation is measured by, lower is better.
        metric_name: With its unit.
        batches: Sizes of mini-batches that may be tried; None is all examples. The first is the usual
            one, the last that of methods for large mini-batches.
        evaluated: Examples for the training loss and for validation; None is all of them.
        loss_scale: Size of the loss over that of one class's cross-entropy, for SGD's rates.
        clip: Largest norm of a first-order method's gradient.
        penalty: η of the term η/2 ‖θ‖² in everyone's objective.
        error_for_loss: Whether "training loss" is the metric on training examples, as in the paper.
        judged_by: What decides: the lowest validation loss, or the training loss at the end.
    """

    name: str
    about: str
    load: Callable[[], Split]
    build: Callable[[], nn.Module]
    loss: Callable[[], nn.Module]
    metric: Metric
    metric_name: str
    batches: tuple[int | None, ...]
    evaluated: tuple[int | None, int | None] = (None, None)
    loss_scale: float = 1.0
    clip: float | None = None
    penalty: float = 0.0
    error_for_loss: bool = False
    judged_by: Literal["validation", "training"] = "validation"

    @cached_property
    def split(self) -> Split:
        """Its examples, read once."""
        return self.load()

    @cached_property
    def evaluated_cases(self) -> Split:
        """The examples that are evaluated."""
        split = self.split
        return Split(
            spread_out(split.train, self.evaluated[0]),
            spread_out(split.validation, self.evaluated[1]),
        )

    @property
    def examples(self) -> int:
        """Number of training examples."""
        return len(self.split.train)

    def make_model(self, seed: int) -> nn.Module:
        """The network of a seed, in training mode; the global generator is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

    def objective(self, model: nn.Module, loss: nn.Module, batch: Batch) -> Tensor:
        """The loss of a mini-batch, without the penalty."""
        x, y = batch
        value: Tensor = loss(model(x), y)
        return value

    def batch(self, rows: Tensor) -> Batch:
        """The training examples in these rows."""
        train = self.split.train
        return train.inputs[rows], train.targets[rows]

    def shuffled(self, size: int | None, seed: int) -> Iterator[Batch]:
        """Mini-batches for ever: each epoch in a new order, without a smaller last one."""
        generator = torch.Generator().manual_seed(seed)
        size = min(size or self.examples, self.examples)
        while True:
            order = torch.randperm(self.examples, generator=generator)
            for rows in order[: self.examples - self.examples % size].split(size):
                yield self.batch(rows)

    def training_loss(self, model: nn.Module) -> float:
        """On the evaluated training examples, in `eval()` mode."""
        loss, metric = self._evaluate(model, self.evaluated_cases.train)
        return metric if self.error_for_loss else loss

    def validation(self, model: nn.Module) -> tuple[float, float]:
        """Loss and metric on the evaluated validation examples, in `eval()` mode."""
        return self._evaluate(model, self.evaluated_cases.validation)

    @torch.no_grad()
    def _evaluate(self, model: nn.Module, cases: Cases) -> tuple[float, float]:
        """Means over the examples, from the model's outputs in float64."""
        model.eval()
        loss_module, loss, metric = self.loss(), 0.0, 0.0
        for x, y in zip(
            cases.inputs.split(EVALUATED_AT_A_TIME),
            cases.targets.split(EVALUATED_AT_A_TIME),
            strict=True,
        ):
            outputs = model(x).double()
            targets = y.double() if y.is_floating_point() else y
            share = len(x) / len(cases)
            loss += share * float(loss_module(outputs, targets))
            metric += share * float(self.metric(outputs, targets).mean())
        model.train()
        return loss, metric


def spread_out(cases: Cases, count: int | None) -> Cases:
    """`count` examples at equal distances: a text changes from play to play."""
    if count is None or count >= len(cases):
        return cases
    rows = torch.linspace(0, len(cases) - 1, count).round().long()
    return cases.select(rows)


def state_bytes(value: Any) -> int:
    """Bytes of all tensors in nested dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(state_bytes, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(state_bytes, value))
    return 0


# -------------------------------------------------------------------------------------------- metrics

ERROR = "error, %"


def misclassified(outputs: Tensor, targets: Tensor) -> Tensor:
    """100 or 0 for each example or place: outputs (N, C, …), classes (N, …)."""
    return 100.0 * (outputs.argmax(dim=1) != targets).double()


def misclassified_by_sign(outputs: Tensor, targets: Tensor) -> Tensor:
    """100 or 0 for each example: logits and classes 0 or 1, (N, 1)."""
    return 100.0 * ((outputs > 0) != (targets > 0.5)).double()


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over the outputs of each example."""
    return (outputs - targets).double().square().flatten(1).mean(dim=1)


def pixel_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖σ(z) − y‖² of each example, as [MG15 §13] reports it."""
    return (outputs.sigmoid() - targets).double().square().sum(dim=1)


def summed_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖z − y‖² of each example."""
    return (outputs - targets).double().square().sum(dim=1)
