"""The objective at a point θ: what the closure found there, and the loss elsewhere on the same rows.

Nothing here changes anything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kronfac.closure import Rows
from kronfac.factors import KroneckerFactors
from kronfac.layers import Layer, Matrices, dot
from kronfac.minibatch import Batch
from kronfac.objective import Objective

# Relative difference, in ε of the parameters' dtype, between the loss that a closure returned and the
# loss of the rows it used above which the closure computes something that K-FAC cannot see. Both are
# of the same pass: only the summation over micro-batches differs.
LOSS_TOLERANCE = 64


class RefusedError(Exception):
    """This step must not be taken."""


@dataclass(frozen=True)
class Network:
    """What is trained: a model, its layers in order, and what its outputs are judged by."""

    model: nn.Module
    layers: Sequence[Layer]
    objective: Objective

    def case_weight(self, batch: Batch) -> float:
        """c, what multiplies the Fisher of an average case."""
        return self.objective.case_weight(batch.cases, batch.outputs)

    def resolution(self, batch: Batch) -> float:
        """The loss below which its gradient is rounding error."""
        if not self.objective.likelihood.saturates:
            return 0.0
        return self.case_weight(batch) * torch.finfo(self.layers[0].dtype).eps

    def theta(self) -> Matrices:
        """The parameters, a copy."""
        joined = ((layer.join(layer.parameters()), layer.parameters()[0]) for layer in self.layers)
        # Without a bias there is nothing to join.
        return tuple(V.clone() if V.data_ptr() == weight.data_ptr() else V for V, weight in joined)

    def parameters_at(self, delta: Matrices) -> dict[str, Tensor]:
        """θ + δ by the parameters' names."""
        return {
            name: parameter + part
            for layer, V in zip(self.layers, delta, strict=True)
            for name, parameter, part in zip(
                layer.parameter_names(), layer.parameters(), layer.split(V), strict=True
            )
        }


@dataclass(frozen=True)
class Evaluation:
    """The objective at θ on the rows of the mini-batch S′."""

    returned: Tensor
    """The loss as the closure returned it."""
    loss: Tensor
    """The same, but for a closure in half precision: see `in_full_precision`."""
    weight_decay: float
    batch: Batch
    reevaluate: Callable[[Matrices], Tensor]
    """The loss at θ + δ by calling the closure there, for losses that K-FAC cannot see."""

    def seen(self, loss: float, seen_loss: float, dtype: torch.dtype) -> bool:
        """Whether the closure's loss is the loss module's value on the model's outputs."""
        largest = max(abs(loss), abs(seen_loss))
        tolerance = LOSS_TOLERANCE * torch.finfo(dtype).eps * largest
        return math.isfinite(largest) and abs(loss - seen_loss) <= tolerance

    def loss_seen(self, dtype: torch.dtype) -> bool:
        """The same of its own loss, for which the host waits."""
        seen = self.batch.seen_loss
        return seen is not None and self.seen(float(self.loss), float(seen), dtype)


@dataclass(frozen=True)
class Point(Evaluation):
    """What the closure found at θ."""

    gradient: Matrices
    """Of h, weight decay included."""
    rows: tuple[Rows, ...] | None = None
    """The gradient in factors, for the low-rank route."""


def moved_loss(
    network: Network, evaluation: Evaluation, loss_seen: bool, delta: Matrices
) -> Tensor:
    """The loss at θ + δ on the rows of `evaluation`, by a forward pass, in float64."""
    if not loss_seen:
        return evaluation.reevaluate(delta).double()
    return _loss(network, evaluation.batch, network.parameters_at(delta))


def in_full_precision(network: Network, evaluation: Evaluation) -> Evaluation:
    """For a closure in half precision: with the loss as K-FAC's own passes find it, where they can.

    The change of the loss with a step is the difference of two such; in half precision it would be rounding
    error. By how much `returned` differs is for a judgement to know, as noise: so does the gradient.
    """
    if not evaluation.loss_seen(network.layers[0].dtype):
        return evaluation
    loss = _loss(network, evaluation.batch)
    return replace(evaluation, loss=loss, batch=replace(evaluation.batch, seen_loss=loss))


def _loss(network: Network, batch: Batch, parameters: Mapping[str, Tensor] | None = None) -> Tensor:
    """By a forward pass, with other parameters if given, in float64."""
    device = network.layers[0].parameters()[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for call in batch.calls:
        assert call.targets is not None
        outputs = call.run(network.model, parameters)
        total = total + network.objective.total(outputs, call.targets, batch.cases).double()
    return total


def objective_change(
    network: Network, evaluation: Evaluation, loss_seen: bool, delta: Matrices
) -> float:
    """h(θ + δ) − h(θ) on S′, weight decay included [MG15 §6.5]."""
    old = evaluation.batch.seen_loss if loss_seen else evaluation.loss
    assert old is not None
    change = moved_loss(network, evaluation, loss_seen, delta) - old.double()
    return float(change) + decay_change(network, evaluation.weight_decay, delta)


def decay_change(network: Network, weight_decay: float, delta: Matrices) -> float:
    """η/2 (‖θ + δ‖² − ‖θ‖²) without the cancellation."""
    if weight_decay == 0:
        return 0.0
    return weight_decay * float(dot(network.theta(), delta) + dot(delta, delta) / 2)


def check_finite(point: Point, factors: KroneckerFactors, layers: Sequence[Layer]) -> None:
    """Raise `RefusedError` with the first cause of non-finite numbers, if there is one."""
    if not bool(point.loss.isfinite()):
        raise RefusedError(f"The loss is {float(point.loss)}.")
    for layer, V in zip(layers, point.gradient, strict=True):
        if not bool(V.isfinite().all()):
            raise RefusedError(f"The gradient of layer {layer.name!r} is not finite.")
    for layer, A, G in zip(layers, factors.A, factors.G, strict=True):
        if not bool(A.isfinite().all() and G.isfinite().all()):
            raise RefusedError(f"The statistics of layer {layer.name!r} are not finite.")
