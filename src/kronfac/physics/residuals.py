"""The residuals of a recorded mini-batch, with their Jacobian as a matrix.

The objective is h(θ) = ½ rᵀWr + η/2 ‖θ‖², up to a constant: each loss call adds s w_t F_R ‖z_t − y_t‖² / 2.
Vectors in parameter space are (parameters,), unit after unit, as the columns of J.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kronfac.curvature import SummedGradient
from kronfac.errors import ClosureError, UnsupportedModelError
from kronfac.linearize import Traced
from kronfac.model import Matrices, Network
from kronfac.model.side_effects import unseen_writes
from kronfac.objective import Gaussian, Terms
from kronfac.record import Batch

STRIDE = 0.1
"""ε of a second derivative along a step v, in units of v: how r bends on the way of the step counts."""
PIECES = 8
"""Parts of the columns of J that `lower_gram` takes one after the other."""


@dataclass(frozen=True)
class Residuals:
    """r, J and W at θ."""

    network: Network
    batch: Batch
    values: Tensor
    """r, (residuals,)."""
    jacobian: Tensor
    """J, (residuals, parameters)."""
    weights: Tensor
    """The diagonal of W, (residuals,)."""

    @cached_property
    def loss(self) -> float:
        """½ rᵀWr."""
        return float(self.weights @ self.values.square()) / 2

    @cached_property
    def gradient(self) -> Tensor:
        """JᵀWr."""
        return self.pull(self.values)

    @cached_property
    def fisher(self) -> Tensor:
        """F = JᵀWJ on and below its diagonal, (parameters, parameters)."""
        return lower_gram(self.jacobian * self.weights.sqrt().unsqueeze(1))

    def pull(self, vector: Tensor) -> Tensor:
        """JᵀW v."""
        return self.jacobian.mT @ (self.weights * vector)

    @torch.no_grad()
    def at(self, delta: Tensor, factor: float = 1.0) -> Tensor:
        """r(θ + factor · δ)."""
        network = self.network
        with (
            unseen_writes(network.parameters),
            network.displaced(self.matrices(delta), factor),
        ):
            return torch.cat(
                [
                    _residual(terms, terms.matrix(raw))
                    for part in self.batch.passes
                    for terms, raw in zip(part.terms, part.run(network.model), strict=True)
                ]
            )

    def change(self, there: Tensor) -> float:
        """½ (rᵀWr there − rᵀWr here), without the cancellation."""
        return float(self.weights @ ((there - self.values) * (there + self.values))) / 2

    def second_derivative(self, v: Tensor) -> Tensor:
        """r″ = d²r(θ + t v)/dt² at t = 0, up to the third derivative: one forward pass."""
        slope = (self.at(v, STRIDE) - self.values) / STRIDE
        return (slope - self.jacobian @ v) * (2 / STRIDE)

    def matrices(self, v: Tensor) -> Matrices:
        """A vector as one matrix per unit."""
        shapes = [unit.shape for unit in self.network.units]
        parts = v.split([math.prod(shape) for shape in shapes])
        return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


def linearize_residuals(network: Network, batch: Batch) -> Residuals:
    """The residuals of all loss calls, their weights and their Jacobian.

    Raises:
        ClosureError: the closure called no loss, or one that is not a sum of squares.
        UnsupportedModelError: the backward pass does not show the gradient of each residual.
    """
    if not batch.seen or not batch.passes:
        raise ClosureError(
            "DenseLevenbergMarquardt needs a closure that computes its loss with kronfac.least_squares or "
            "nn.MSELoss and calls backward() on it; it saw no such loss."
        )
    rows, weights, values = [], [], []
    for part in batch.passes:
        for terms in part.terms:
            if not isinstance(terms.likelihood, Gaussian):
                raise ClosureError(
                    "DenseLevenbergMarquardt minimises sums of squares; the closure called a loss of "
                    f"{type(terms.likelihood).__name__}. Use kronfac.KFAC for it."
                )
            if terms.count != part.examples:
                raise UnsupportedModelError(
                    "DenseLevenbergMarquardt needs residuals with one row for each of the points that the "
                    f"model was called with, {part.examples}; got {terms.count}."
                )
        view = Traced(network, part)
        for n, (terms, z) in enumerate(zip(part.terms, view.outputs, strict=True)):
            w = terms.weigh(terms.likelihood.fisher_product(z, torch.ones_like(z)))
            values.append(_residual(terms, z))
            for column in range(terms.event):
                vectors: list[Tensor | None] = [None] * len(part.terms)
                vectors[n] = torch.zeros_like(z)
                vectors[n][:, column] = 1  # type: ignore[index]
                rows.append(_rows(network, view, vectors, part.examples))
                weights.append(w[:, column])
    return Residuals(network, batch, torch.cat(values), torch.cat(rows), torch.cat(weights))


def _rows(network: Network, view: Traced, vectors: list[Tensor | None], examples: int) -> Tensor:
    """The rows of J of one residual per example, (examples, parameters), by one backward pass."""
    columns = []
    for unit, uses in zip(network.units, view.taps(vectors), strict=True):
        if isinstance(uses, SummedGradient) or any(tap.examples != examples for tap in uses):
            raise UnsupportedModelError(
                "DenseLevenbergMarquardt needs the gradient of each residual by itself, which K-FAC does "
                f"not see for {unit.name!r}. Use a perceptron, or kronfac.KFAC for this model."
            )
        total = network.units[0].parameters[0].new_zeros(examples, math.prod(unit.shape))
        for tap in uses:
            total += tap.gradients().flatten(1)
        columns.append(total)
    return torch.cat(columns, dim=1)


def _residual(terms: Terms, z: Tensor) -> Tensor:
    """z − y, column after column like the rows of J, (residuals,)."""
    y = terms.targets
    return (z if y is None else z - y.reshape(z.shape)).mT.reshape(-1)


def lower_gram(A: Tensor) -> Tensor:
    """AᵀA on and below its diagonal, (columns, columns); zeros, or some of the rest, above.

    By a few rows at a time, which leaves out most of what is above: 9/16 of the multiplications.
    """
    size = A.shape[1]
    gram = A.new_zeros(size, size)
    width = -(-size // PIECES)
    for start in range(0, size, width):
        stop = start + width
        gram[start:stop, :stop] = A[:, start:stop].mT @ A[:, :stop]
    return gram
