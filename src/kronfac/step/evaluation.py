"""Loss and gradient at θ, and the loss at θ + δ (`collect.py` evaluates closures and loops).

A user's closure and its micro-batches, K-FAC's own closure and a loop all end in an `Evaluation`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kronfac.curvature import Curvature
from kronfac.distributed import (
    HERE,
    Portion,
    World,
)
from kronfac.errors import ClosureError
from kronfac.groups import PerParameter
from kronfac.linalg import OuterProduct
from kronfac.linearize.by_hand import outputs_at
from kronfac.model import Kept, Matrices, Network, RandomState, dot, replay, restore
from kronfac.record import Batch
from kronfac.report import EventKind

LOSS_TOLERANCE = 64
"""Relative difference, in ε of the parameters' dtype, between the loss that a closure returned and the loss
of the calls that were seen, above which the closure computes something that K-FAC cannot see. Both are of
the same pass: only the summation over micro-batches differs."""


class RefusedError(Exception):
    """This step must not be taken."""

    def __init__(self, message: str = "", cause: EventKind = EventKind.NONFINITE_STEP) -> None:
        super().__init__(message)
        self.cause = cause


class HostNumbers(NamedTuple):
    """Numbers of an evaluation that decisions depend on."""

    returned: float
    """The loss as it was returned."""
    loss: float
    """The loss; another number for a closure in half precision."""
    recorded: float | None
    """The sum of the recorded loss calls; None if not all were recorded, or there is no closure."""
    penalty: float
    """½ Σ_p η_p ‖p‖²."""
    resolution: float
    """The loss below which its gradient is rounding error."""
    padded: bool
    """Whether some terms have no weight."""


@dataclass(frozen=True)
class Evaluation:
    """The objective at θ on the examples of the mini-batch S′."""

    network: Network
    """With its layers in the order of the chain, if that matters."""
    returned: Any
    """What the closure returned."""
    returned_loss: Tensor
    """The loss that the closure returned, as a tensor without dimensions."""
    loss: Tensor
    """Equal to `returned_loss`, except for a closure in half precision: see `in_full_precision`."""
    weight_decay: PerParameter
    """η."""
    batch: Batch
    reevaluate: Callable[[], Any] | None
    """Calls the closure again, for losses that K-FAC cannot see; None if there is none to call."""
    random: RandomState | None = None
    """The generators' state before the closure was called."""
    matrices: Matrices | None = None
    """The gradient without weight decay by unit, if a pass by hand has made it."""
    factors: Sequence[OuterProduct] | None = None
    """The same as outer products, if they are wanted."""
    buffers: Sequence[Kept] = ()
    """Buffers that forward passes write to, as they were before the closure was called."""
    portion: Portion = HERE
    """This rank's portion of the mini-batch. `returned`, `batch` and `factors` are its own; losses and
    gradients are those of all ranks."""
    clipped: float = 1.0
    """The factor by which clipping has changed the gradient; 1 if it is not known."""
    gradients: Mapping[nn.Parameter, Tensor] | None = None
    """Sums of the gradients of all ranks; None if `p.grad` has them already."""

    @property
    def examples(self) -> int:
        """m, the examples on all ranks."""
        return self.batch.examples + self.portion.examples_elsewhere

    @property
    def world(self) -> World:
        """The ranks, each with a portion of the mini-batch."""
        return self.portion.world

    @cached_property
    def recorded_loss(self) -> Tensor | None:
        """The sum of the recorded loss calls, of all ranks; None if not all were recorded."""
        own, portion = self.batch.recorded_loss, self.portion
        if own is None or portion.world.size == 1:
            return own
        return None if portion.recorded_loss is None else like(own, portion.recorded_loss)

    @cached_property
    def loss_seen(self) -> bool:
        """Whether the loss is the sum of the recorded loss calls, so that K-FAC can compute it at θ + δ.

        Otherwise the closure is called again. In a loop without a closure it always is.
        """
        if self.reevaluate is None:
            return self.recorded_loss is not None
        numbers = self.numbers
        return numbers.recorded is not None and self.agrees(numbers.loss, numbers.recorded)

    @cached_property
    def numbers(self) -> "HostNumbers":
        """The numbers that decisions before the step depend on, in one synchronisation with the device."""
        eta, parameters = self.weight_decay, self.network.parameters
        recorded = None if self.reevaluate is None else self.recorded_loss
        terms = [terms for part in self.batch.passes for terms in part.terms]
        weights = [one.weight for one in terms if one.weight is not None]
        flat = [p.detach().reshape(-1) for p in parameters] if eta else []
        scalars = [self.returned_loss, self.loss, *([] if recorded is None else [recorded])]
        scalars += [torch.dot(p, p) for p in flat]
        scalars += [
            number for w in weights for number in (w.sum(dtype=torch.float64), (w == 0).any())
        ]
        returned, loss, *rest = torch.stack([scalar.double() for scalar in scalars]).tolist()
        seen = None if recorded is None else rest.pop(0)
        norms, found = rest[: len(flat)], rest[len(flat) :]
        penalty = sum(eta[p] / 2 * n for p, n in zip(parameters, norms, strict=False))
        sums, weight = iter(found[::2]), self.portion.weight
        if self.world.size == 1:
            totals = [one.total_of(None if one.weight is None else next(sums)) for one in terms]
            weight = sum(
                total for one, total in zip(terms, totals, strict=True) if one.likelihood.saturates
            )
        eps = torch.finfo(self.network.dtype).eps
        return HostNumbers(returned, loss, seen, penalty, weight * eps, any(found[1::2]))

    def scaled(self, factor: float) -> "Evaluation":
        """The evaluation with the recorded losses, of all ranks, times a factor.

        What a closure returned stays; the loss of a loop is the sum of the recorded ones.
        """
        if factor == 1:
            return self
        portion = self.portion
        recorded = None if portion.recorded_loss is None else portion.recorded_loss * factor
        portion = replace(portion, recorded_loss=recorded, weight=portion.weight * factor)
        scaled = replace(self, batch=self.batch.scaled(factor), portion=portion)
        if self.reevaluate is not None or (loss := scaled.recorded_loss) is None:
            return scaled
        return replace(scaled, loss=loss, returned_loss=loss)

    @cached_property
    def gradient(self) -> Matrices:
        """∇h, the weight decay's ηθ included; a validation does not need its memory.

        A unit that this mini-batch left without a gradient has zeros, without weight decay.

        Raises:
            ClosureError: no unit has a gradient.
        """
        if self.matrices is not None and not self.weight_decay:
            return self.matrices
        if len(self.without_gradient) == len(self.network.units):
            raise ClosureError(
                f"The closure left no gradient in {self.network.units[0].name!r} nor in any other trained "
                "parameter: it has to call backward() on a loss that depends on them."
            )
        gradients = []
        for n, unit in enumerate(self.network.units):
            given = [self.gradient_of(p) for p in unit.parameters]
            grads = [grad for grad in given if grad is not None]
            if n in self.without_gradient:
                pairs = zip(given, unit.parameters, strict=True)
                gradients.append(
                    unit.join([torch.zeros_like(p) if g is None else g for g, p in pairs])
                )
            elif self.weight_decay and unit.swapped:
                decayed = zip(grads, unit.parameters, strict=True)
                gradients.append(unit.join([g + self.weight_decay[p] * p for g, p in decayed]))
            elif self.weight_decay:
                V = grads[0].new_empty(unit.shape)
                for part, grad, p in zip(unit.split(V), grads, unit.parameters, strict=True):
                    torch.add(grad, p, alpha=self.weight_decay[p], out=part)  # one pass over memory
                gradients.append(V)
            else:
                gradients.append(unit.join(grads))
        return tuple(gradients)

    @cached_property
    def without_gradient(self) -> set[int]:
        """The numbers of the units with parameters that the closure left no gradient in."""
        return {
            n
            for n, unit in enumerate(self.network.units)
            if any(self.gradient_of(p) is None for p in unit.parameters)
        }

    def names_without_gradient(self) -> list[str]:
        """Names without a gradient: of whole units, and of single parameters where a unit has some."""
        names = []
        for n in sorted(self.without_gradient):
            unit = self.network.units[n]
            has = [self.gradient_of(p) is not None for p in unit.parameters]
            pairs = zip(unit.names, has, strict=True)
            names += [name for name, one in pairs if not one] if any(has) else [unit.name]
        return names

    def gradient_of(self, p: nn.Parameter) -> Tensor | None:
        """The gradient of a parameter, of all ranks; None if this mini-batch has left none."""
        if self.gradients is not None:
            return self.gradients.get(p)
        return p.grad

    def agrees(self, loss: float, other: float) -> bool:
        """Whether two losses are the same but for rounding."""
        largest = max(abs(loss), abs(other))
        tolerance = LOSS_TOLERANCE * torch.finfo(self.network.dtype).eps * largest
        return math.isfinite(largest) and abs(loss - other) <= tolerance

    def lost_to_clipping(self, delta: Matrices, slope: float) -> float:
        """The part of M(δ) − M(0) that is missing because clipping has multiplied the gradient by c.

        The objective follows the whole gradient: with g the clipped one of the loss and H = diag(η),
        M(δ) − M(0) = gᵀδ/c + θᵀHδ + ½ δᵀ(F + λI + H)δ, whereas `slope` is gᵀδ + θᵀHδ.
        """
        if self.clipped == 1:
            return 0.0
        decay = 0.0
        if self.weight_decay:
            parameters = tuple(self.network.parameters)
            parts = tuple(self.network.split(delta))
            decay = float(dot(parameters, tuple(self.weight_decay.times(parameters, parts))))
        return (slope - decay) * (1 / self.clipped - 1)

    def loss_at(self, delta: Matrices) -> Tensor:
        """The loss at θ + δ on the same examples, float64: by a forward pass, or by calling the closure."""
        if self.loss_seen or self.reevaluate is None:
            return self._over_ranks(_loss(self.network, self.batch, delta))
        parameters = self.network.parameters
        kept = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = None
            # With the first call's random numbers and buffers, or the two losses could not be compared.
            with replay(self.random), self.network.displaced(delta), torch.enable_grad():
                restore(self.buffers)
                returned = self.reevaluate()
            loss = as_loss(returned, self.network.device).double()
            return self._over_ranks(loss * self.portion.share)
        finally:
            for p, grad in zip(parameters, kept, strict=True):
                p.grad = grad

    def _over_ranks(self, loss: Tensor) -> Tensor:
        """The sum of the ranks' parts of a loss."""
        if self.world.size == 1:
            return loss
        return like(loss, self.world.total([float(loss)], "loss")[0])

    def change(self, delta: Matrices) -> float:
        """h(θ + δ) − h(θ) on S′, weight decay included [MG15 §6.5]."""
        old = self.recorded_loss if self.loss_seen else self.loss
        assert old is not None
        return float(self.loss_at(delta) - old.double()) + self.decay_change(delta)

    def decay_change(self, delta: Matrices) -> float:
        """η/2 (‖θ + δ‖² − ‖θ‖²) without the cancellation."""
        if not self.weight_decay:
            return 0.0
        if self.weight_decay.uniform:
            theta = self.network.theta()
            return self.weight_decay.usual * float(dot(theta, delta) + dot(delta, delta) / 2)
        parameters = tuple(self.network.parameters)
        parts = tuple(self.network.split(delta))
        weighted = tuple(self.weight_decay.times(parameters, parts))
        return float(dot(parameters, weighted) + dot(parts, weighted) / 2)

    def check_finite(self, curvature: Curvature) -> None:
        """Raise `RefusedError` with the first cause of non-finite numbers, if there is one."""
        loss, units = self.loss, self.network.units
        if not bool(loss.isfinite()):
            raise RefusedError(f"The loss is {float(loss)}.", EventKind.NONFINITE_LOSS)
        for unit, V in zip(units, self.gradient, strict=True):
            if not bool(V.isfinite().all()):
                cause = EventKind.NONFINITE_GRADIENT
                raise RefusedError(f"The gradient of {unit.name!r} is not finite.", cause)
        for unit, block in zip(units, curvature.blocks, strict=True):
            if not all(bool(number.isfinite()) for number in block.probe()):
                cause = EventKind.NONFINITE_STATISTICS
                raise RefusedError(f"The statistics of {unit.name!r} are not finite.", cause)


def like(tensor: Tensor, number: float) -> Tensor:
    """A float64 number on the device of a tensor."""
    return torch.tensor(number, dtype=torch.float64, device=tensor.device)


@torch.no_grad()
def _loss(network: Network, batch: Batch, delta: Matrices) -> Tensor:
    """The objective at θ + δ by forward passes, float64."""
    parts: list[Tensor] = []
    others = []
    for part in batch.passes:
        outputs = None if network.convolutional else outputs_at(network, part, delta)
        if outputs is None:
            others.append(part)
        else:
            parts.append(part.losses[0].evaluate(outputs))
    if others:
        with network.displaced(delta):
            for part in others:
                pairs = zip(part.losses, part.run(network.model), strict=True)
                parts += [loss.evaluate(z) for loss, z in pairs]
    return torch.stack(parts).sum()


def as_loss(returned: Any, device: torch.device) -> Tensor:
    """What the closure returned as a tensor without dimensions; a Python number is float64."""
    dtype = torch.float64 if isinstance(returned, float) else None
    try:
        return torch.as_tensor(returned, dtype=dtype, device=device).detach().reshape(())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ClosureError(
            f"The closure has to return the loss, one number; got {returned!r}."
        ) from error
