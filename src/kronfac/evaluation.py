"""What the user's code computed at θ, however it was called: loss, gradient, and the loss elsewhere.

`closure_call.py` and `loop.py` make it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.curvature import Curvature
from kronfac.distributed import HERE, Phase, Spread
from kronfac.distributed.world import on_device
from kronfac.errors import ClosureError
from kronfac.gradient_sum import GradientSum
from kronfac.groups import PerParameter
from kronfac.later import Later
from kronfac.linalg import OuterProduct
from kronfac.linearization.by_hand import outputs_at
from kronfac.network import (
    Batch,
    Kept,
    Matrices,
    Network,
    RandomState,
    dot,
    replay,
    restore,
)
from kronfac.report import EventKind

LOSS_TOLERANCE = 64
"""Relative difference, in ε of the parameters' dtype, between the loss that a closure returned and the loss
of the calls that were seen, above which the closure computes something that K-FAC cannot see. Both are of
the same pass: only the summation over micro-batches differs."""

StaleGradients = Mapping[nn.Parameter, tuple[Tensor, int]]
"""Gradients from before a closure was called, with their versions."""


class RefusedError(Exception):
    """This step must not be taken."""

    def __init__(self, message: str = "", cause: EventKind = EventKind.NONFINITE_STEP) -> None:
        super().__init__(message)
        self.cause = cause


@dataclass(frozen=True)
class Evaluation:
    """The objective at θ on the examples of the mini-batch S′."""

    network: Network
    """With its layers in the order of the chain, if that matters."""
    returned: Any
    """What the closure returned."""
    returned_loss: Tensor
    """The same as a tensor without dimensions."""
    loss: Tensor
    """The same, but for a closure in half precision: see `in_full_precision`."""
    weight_decay: PerParameter
    """η."""
    batch: Batch
    reevaluate: Callable[[], Any] | None
    """Calls the closure again, for losses that K-FAC cannot see; None if there is none to call."""
    stale: StaleGradients
    random: RandomState | None = None
    """The generators' state before the closure was called."""
    factors: Sequence[OuterProduct] | None = None
    """The gradient without weight decay as outer products, if they are wanted."""
    buffers: Sequence[Kept] = ()
    """Buffers that forward passes write to, as they were before the closure was called."""
    spread: Spread = HERE
    """The place of these examples in a mini-batch that several processes have parts of. `returned`, `batch`
    and `factors` are this rank's own; losses and gradients are those of all ranks."""
    clipped: float = 1.0
    """What clipping has multiplied the gradient by; 1 if that is not known."""
    summing: GradientSum | None = None
    """The gradients of all ranks, on their way; None if those in the parameters are right already."""

    @property
    def examples(self) -> int:
        """m, the examples on all ranks."""
        return self.batch.examples + self.spread.examples_elsewhere

    @cached_property
    def seen_loss(self) -> Tensor | None:
        """The objective by the loss calls' own account, if all of it was seen."""
        own = self.batch.seen_loss
        return own if own is None or self.spread.alone else on_device(self.spread.seen_loss, own)

    def scaled(self, factor: float) -> "Evaluation":
        """The same with the terms of all ranks, and with them the loss that was seen, times a factor."""
        spread = self.spread
        if not spread.alone:
            spread = replace(
                spread,
                seen_loss=spread.seen_loss * factor,
                weight=spread.weight * factor,
            )
        return replace(self, batch=self.batch.scaled(factor), spread=spread)

    def gradient(self) -> Matrices:
        """∇h, the weight decay's ηθ included; what was there before the closure does not count.

        A unit that this mini-batch left without a gradient has zeros, without weight decay.

        Raises:
            ClosureError: no unit has a gradient.
        """
        self.check_gradient()
        if self.summing is not None:
            return self._sum_over_ranks(self.summing)
        gradients = []
        for n, unit in enumerate(self.network.units):
            grads = [p.grad for p in unit.parameters if p.grad is not None and self.fresh(p)]
            if n in self.without_gradient:
                given = [p.grad if self.fresh(p) else None for p in unit.parameters]
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

    def _sum_over_ranks(self, summing: GradientSum) -> Matrices:
        """∇h from the gradients that every rank has of its own examples."""
        gradients = summing.matrices(self.network)
        if not self.weight_decay:
            return gradients
        decay = self.weight_decay
        return tuple(
            V + unit.join(decay.times(unit.parameters, unit.parameters))
            if summing.has_gradient(unit)
            else V
            for unit, V in zip(self.network.units, gradients, strict=True)
        )

    def check_gradient(self) -> None:
        """Raise a `ClosureError` if no unit has a gradient."""
        if len(self.without_gradient) == len(self.network.units):
            raise ClosureError(
                f"The closure left no gradient in {self.network.units[0].name!r} nor in any other trained "
                "parameter: it has to call backward() on a loss that depends on them."
            )

    @cached_property
    def without_gradient(self) -> set[int]:
        """The numbers of the units with parameters that the closure left no gradient in."""
        units = enumerate(self.network.units)
        return {n for n, unit in units if not all(self.fresh(p) for p in unit.parameters)}

    def names_without_gradient(self) -> list[str]:
        """What the closure left no gradient in: units, and parameters of those that it left some in."""
        names = []
        for n in sorted(self.without_gradient):
            unit = self.network.units[n]
            fresh = [self.fresh(p) for p in unit.parameters]
            pairs = zip(unit.names, fresh, strict=True)
            names += [name for name, has in pairs if not has] if any(fresh) else [unit.name]
        return names

    def fresh(self, p: nn.Parameter) -> bool:
        """Whether the closure left a gradient in a parameter."""
        old, version = self.stale.get(p, (None, 0))
        return p.grad is not None and (p.grad is not old or p.grad._version != version)

    def accumulated(self) -> bool:
        """Whether the closure wrote to gradients that were there before: added to them, or zeroed first."""
        return any(
            p.grad is old and old._version != version for p, (old, version) in self.stale.items()
        )

    def agrees(self, loss: float, seen_loss: float) -> bool:
        """Whether the closure's loss is that of the loss calls that were seen."""
        largest = max(abs(loss), abs(seen_loss))
        tolerance = LOSS_TOLERANCE * torch.finfo(self.network.dtype).eps * largest
        return math.isfinite(largest) and abs(loss - seen_loss) <= tolerance

    def loss_seen(self) -> bool:
        """The same for its own loss, for which the host waits."""
        seen = self.seen_loss
        return seen is not None and self.agrees(float(self.loss), float(seen))

    def comparable(self) -> bool:
        """Whether the loss can be had, here and elsewhere than at θ; else `loss` is 0 and says nothing."""
        return self.reevaluate is not None or self.seen_loss is not None

    def loss_at(self, delta: Matrices, loss_seen: bool) -> Tensor:
        """The loss at θ + δ on the same examples, float64: by a forward pass, or by calling the closure."""
        if loss_seen or self.reevaluate is None:
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
            return self._over_ranks(loss * self.spread.share)
        finally:
            for p, grad in zip(parameters, kept, strict=True):
                p.grad = grad

    def _over_ranks(self, loss: Tensor) -> Tensor:
        """The sum of the ranks' parts of a loss."""
        if self.spread.alone:
            return loss
        return on_device(self.spread.world.total(Phase.LOSS, [float(loss)])[0], loss)

    def change(self, delta: Matrices, loss_seen: bool) -> float:
        """h(θ + δ) − h(θ) on S′, weight decay included [MG15 §6.5]."""
        old = self.seen_loss if loss_seen or self.reevaluate is None else self.loss
        assert old is not None
        return float(self.loss_at(delta, loss_seen) - old.double()) + self.decay_change(delta)

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

    @property
    def resolution(self) -> float:
        """The loss below which its gradient is rounding error."""
        eps = torch.finfo(self.network.dtype).eps
        if not self.spread.alone:
            return self.spread.weight * eps
        terms = [terms for part in self.batch.passes for terms in part.terms]
        return sum(t.total_weight for t in terms if t.likelihood.saturates) * eps


@dataclass(frozen=True)
class Point:
    """An evaluation with its gradient, which takes memory that a validation can do without."""

    evaluation: Evaluation
    later: Later[Matrices]

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Point":
        """With the gradient that the closure left, or the sum of those of all ranks, once it is needed."""
        evaluation.check_gradient()
        later = Later(evaluation.gradient)
        if evaluation.summing is None:
            _ = later.value
        return cls(evaluation, later)

    @property
    def gradient(self) -> Matrices:
        """∇h, weight decay included."""
        return self.later.value

    def check_finite(self, curvature: Curvature) -> None:
        """Raise `RefusedError` with the first cause of non-finite numbers, if there is one."""
        loss, units = self.evaluation.loss, self.evaluation.network.units
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


def in_full_precision(evaluation: Evaluation) -> Evaluation:
    """For a closure in half precision: with the loss as K-FAC's own passes find it, if they can.

    The change of the loss with a step is the difference of two such; in half precision it would be rounding
    error. By how much `returned_loss` differs counts as noise when the step is validated: so does the
    gradient.
    """
    if not evaluation.loss_seen():
        return evaluation
    passes = []
    for part in evaluation.batch.passes:
        with evaluation.network.buffers.preserved():
            outputs = part.run(evaluation.network.model)
        losses = tuple(
            replace(loss, value=loss.evaluate(z))
            for loss, z in zip(part.losses, outputs, strict=True)
        )
        passes.append(replace(part, losses=losses))
    batch = replace(evaluation.batch, passes=tuple(passes))
    loss, spread = batch.seen_loss, evaluation.spread
    assert loss is not None
    if not spread.alone:
        total = spread.world.total(Phase.LOSS, [float(loss)])[0]
        loss, spread = on_device(total, loss), replace(spread, seen_loss=total)
    return replace(evaluation, loss=loss, batch=batch, spread=spread)


@torch.no_grad()
def _loss(network: Network, batch: Batch, delta: Matrices) -> Tensor:
    """The objective at θ + δ by forward passes, float64."""
    parts: list[Tensor] = []
    others = []
    for part in batch.passes:
        outputs = outputs_at(network, part, delta)
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
