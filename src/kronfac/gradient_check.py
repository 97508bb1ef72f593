"""Is what K-FAC sees of the closure what the closure differentiates?

The gradient that the closure left is compared with two that K-FAC computes over the same examples: that of
the loss calls it has seen, by autograd, and the one rebuilt from the recorded uses, Σ g āᵀ. If the first
does not agree, the closure's loss has parts that K-FAC does not see, or its gradient is scaled; if only the
second does not, for some unit, there are uses of that unit that K-FAC does not see.
"""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.curvature import SummedGradient
from kronfac.evaluation import Evaluation, in_full_precision
from kronfac.linearization import Traced
from kronfac.network import Matrices, Network, Pass, dot

INTERVAL = 100
"""Iterations from one comparison to the next; the first mini-batch is always compared."""
TOLERANCE, MIXED_TOLERANCE = 10.0, 0.2
"""How far gradients may differ relative to their size: in roots of the dtype's precision, 5e-3 in float32
and 2e-7 in float64; and as it is if the closure ran in half precision."""
ROUNDING = 64
"""What else they may differ by, in the dtype's precision times the size of what is summed: the gradients
of single examples, of which next to nothing is left near a minimum."""


@dataclass(frozen=True)
class Verdict:
    """What a comparison found."""

    scale: float = 1.0
    """By what factor the closure's gradient is larger than that of the loss calls."""
    others: tuple[str, ...] = ()
    """The parameters whose gradient is another, whatever the factor."""
    unseen: tuple[str, ...] = ()
    """The parameters that have uses which K-FAC does not see."""


def compare(evaluation: Evaluation, gradient: Matrices) -> Verdict | None:
    """Compare the closure's gradient with what K-FAC sees; `gradient` has no weight decay in it.

    None if that says nothing: numbers are not finite, or all digits are lost.
    """
    network, mixed = evaluation.network, evaluation.batch.mixed
    if mixed and not _agree(evaluation, float(evaluation.returned_loss), float(evaluation.loss)):
        return None
    seen, rebuilt, summed, half = _gradients(network, evaluation.batch.passes)
    precision = torch.finfo(network.dtype).eps
    tolerance, rounding = TOLERANCE * precision**0.5, ROUNDING * precision
    product, square = float(dot(seen, gradient)), float(dot(seen, seen))
    if not all(map(math.isfinite, (product, square, *summed))) or square == 0:
        return None  # such a step is refused, or there is nothing to compare
    scale = product / square
    rest = tuple(g - scale * s for g, s in zip(gradient, seen, strict=True))
    # The closure's gradient may be in half precision; what K-FAC computes itself is not.
    allowed = (MIXED_TOLERANCE, MIXED_TOLERANCE) if mixed else (tolerance, rounding)
    size, noise = float(dot(gradient, gradient)) ** 0.5, allowed[1] * sum(summed)
    if not float(dot(rest, rest)) ** 0.5 <= allowed[0] * size + noise:
        noises = [allowed[1] * part for part in summed]
        return Verdict(others=_differing(network, gradient, seen, allowed[0], noises))
    known = [s if r is None else r for s, r in zip(seen, rebuilt, strict=True)]
    noises = [rounding * part for part in summed]
    unseen = _differing(network, seen, known, MIXED_TOLERANCE if half else tolerance, noises)
    if mixed:
        scale = _scale_in_half_precision(evaluation, scale)
    elif abs(scale - 1) <= allowed[0] + noise / square**0.5:
        scale = 1.0
    return Verdict(scale, unseen=unseen)


def _scale_in_half_precision(evaluation: Evaluation, scale: float) -> float:
    """The ratio of the losses, if the gradient is nearer to that than to 1; else 1.

    Half precision leaves too few digits of a gradient near a minimum to tell its scale from nothing.
    """
    seen = evaluation.batch.seen_loss
    assert seen is not None
    ratio = float(evaluation.returned_loss) / float(seen) if float(seen) else 1.0
    if not 0 < ratio < math.inf or abs(ratio - 1) <= MIXED_TOLERANCE:
        return 1.0
    nearer = scale <= 0 or abs(math.log(scale / ratio)) < abs(math.log(scale))
    return ratio if nearer else 1.0


def _differing(
    network: Network,
    expected: Sequence[Tensor],
    found: Sequence[Tensor],
    tolerance: float,
    noises: Sequence[float],
) -> tuple[str, ...]:
    """The parameters for which two vectors differ by more than their size and rounding allow."""
    names = []
    for unit, V, W, noise in zip(network.units, expected, found, noises, strict=True):
        for name, v, w in zip(unit.names, unit.split(V), unit.split(W), strict=True):
            if not _norm(v - w) <= tolerance * _norm(v) + noise:
                names.append(name)
    return tuple(names)


def _norm(V: Tensor) -> float:
    return float(V.double().norm())


def _gradients(
    network: Network, passes: Sequence[Pass]
) -> tuple[Matrices, list[Tensor | None], list[float], bool]:
    """The gradient of the loss calls, and the one rebuilt from the uses, unit by unit.

    Also Σ ‖g‖ ‖ā‖ of every unit, the size of what the rebuilt one is a sum of; and whether uses are in half
    precision, by an autocast of the model's own.
    """
    total = [torch.zeros(u.shape, dtype=u.dtype, device=network.device) for u in network.units]
    rebuilt: list[Tensor | None] = [None] * len(total)
    sizes, half = [0.0] * len(total), False
    for part in passes:
        view = Traced(network, part)
        slopes = _slopes(view, part)
        for sum_, V in zip(total, view.vjp(slopes), strict=True):
            sum_.add_(V)
        half = half or view.half_precision
        for n, taps in enumerate(view.taps(slopes)):
            if isinstance(taps, SummedGradient):
                continue
            own = rebuilt[n]
            own = torch.zeros_like(total[n]) if own is None else own
            for tap in taps:
                own = own + tap.total()
                sizes[n] += tap.magnitude()
            rebuilt[n] = own
    return tuple(total), rebuilt, sizes, half


def _slopes(view: Traced, part: Pass) -> list[Tensor]:
    """∂h/∂z of every loss call, (terms, event)."""
    slopes = []
    for loss, z in zip(part.losses, view.raw_outputs(), strict=True):
        leaf = z.detach().requires_grad_()
        with torch.enable_grad():
            value = loss.evaluate(leaf)
        (slope,) = torch.autograd.grad(value, leaf)
        slopes.append(loss.terms.matrix(slope))
    return slopes


class GradientCheck:
    """Compares now and then, warns once for each kind of disagreement, and mends what it can."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self._follows_returned = False
        self._scale = 1.0
        self._compared = False

    def __call__(self, evaluation: Evaluation, iteration: int) -> Evaluation:
        """The evaluation as the step may take it: with fallback blocks, and the loss that is minimised."""
        batch = evaluation.batch
        if any(call.trace for part in batch.passes for call in part.calls):
            return evaluation  # the gradient is K-FAC's own, of all that the network consists of
        self._check_parameters(evaluation)
        if batch.seen_loss is None or _changed_by_hooks(evaluation.network):
            return evaluation  # nothing to compare with
        if evaluation.accumulated():
            self._warn(
                "zero_grad",
                "The closure added its gradient to one that was there before, so the step goes by both. "
                "Call optimizer.zero_grad() at its start.",
            )
            return evaluation
        if self._follows_returned:
            evaluation = _scale_to_returned(evaluation)
        # Also on the first mini-batch after a state was loaded.
        if self._compared and iteration > 1 and iteration % INTERVAL:
            return replace(evaluation, batch=evaluation.batch.scaled(self._scale))
        self._scale = 1.0
        gradient = replace(evaluation, weight_decay=0.0).gradient()
        verdict = compare(evaluation, gradient)
        self._compared = self._compared or verdict is not None
        return evaluation if verdict is None else self._mend(evaluation, verdict)

    def _mend(self, evaluation: Evaluation, verdict: Verdict) -> Evaluation:
        """Warn of what disagrees; units with uses that are not seen get a diagonal block."""
        network = evaluation.network
        if verdict.others:
            self._warn(
                "others",
                f"The gradient of {_list(verdict.others)} is not that of the losses that KFAC sees the "
                "closure call: a penalty or another loss is in it. The curvature is that of the losses "
                "seen. Declare the rest with kronfac.observe; weight decay is KFAC(weight_decay=…).",
            )
            return evaluation
        if verdict.unseen:
            names = _list(verdict.unseen)
            self._warn(
                f"uses {names}",
                f"KFAC does not see all uses of {names}: the gradient rebuilt from those it sees is not "
                "the closure's. It gets a diagonal curvature block. Call the module instead of using its "
                "weight, or tell kronfac.register how the parameters are used.",
            )
            units = [n for n, u in enumerate(network.units) if set(u.names) & set(verdict.unseen)]
            evaluation = replace(evaluation, network=network.demoted(units))
        return self._consistent(evaluation, verdict.scale)

    def _consistent(self, evaluation: Evaluation, scale: float) -> Evaluation:
        """The evaluation with a loss whose gradient is the closure's."""
        seen = evaluation.batch.seen_loss
        assert seen is not None
        if not math.isfinite(float(evaluation.returned_loss)):
            return evaluation  # the step is refused
        ratio = float(evaluation.returned_loss) / float(seen) if float(seen) else 1.0
        if scale != 1 and abs(ratio / scale - 1) < MIXED_TOLERANCE:
            # A GradScaler: the loss is scaled on the way back, and the gradient unscaled.
            self._follows_returned = True
            return _scale_to_returned(evaluation)
        if scale != 1:
            self._warn(
                "scale",
                f"The closure's gradient is {scale:.4g} times that of the losses it called; KFAC takes the "
                "gradient for right. Scale the loss before backward(), not the gradient after it.",
            )
            self._scale = scale
            evaluation = replace(evaluation, batch=evaluation.batch.scaled(scale))
            seen = evaluation.batch.seen_loss
            assert seen is not None
        if not _agree(evaluation, float(evaluation.returned_loss), float(seen)):
            ratio = float(seen) / float(evaluation.returned_loss)
            self._warn(
                "returned",
                f"The closure returned a loss of {float(evaluation.returned_loss):.4g}, but its gradient "
                f"is that of {float(seen):.4g}, {ratio:.4g} times as much. KFAC takes the gradient for "
                "right. Return what backward() is called on, summed over all micro-batches.",
            )
        return evaluation

    def _check_parameters(self, evaluation: Evaluation) -> None:
        """Warn of parameters that are trainable and not trained."""
        network = evaluation.network
        known = {id(p) for p in network.parameters}
        new = [
            n for n, p in network.model.named_parameters() if p.requires_grad and id(p) not in known
        ]
        if new:
            self._warn(
                "parameters",
                f"{', '.join(map(repr, new))} became trainable after this KFAC was made, which does not "
                "train them; make a new one after changing the model.",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._given:
            self._given.add(kind)
            warnings.warn(message, UserWarning, stacklevel=2)


def _list(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _changed_by_hooks(network: Network) -> bool:
    """Whether somebody changes gradients on purpose, also those of K-FAC's own passes."""
    return any(p._backward_hooks or p._post_accumulate_grad_hooks for p in network.parameters)


def _agree(evaluation: Evaluation, returned: float, seen: float) -> bool:
    """Whether the closure returned the loss that was seen; half precision has few digits of it."""
    if evaluation.batch.mixed and abs(returned - seen) <= MIXED_TOLERANCE * abs(seen):
        return True
    return evaluation.agrees(returned, seen)


def _scale_to_returned(evaluation: Evaluation) -> Evaluation:
    """The evaluation with its terms scaled so that their loss is the one that was returned."""
    seen = evaluation.batch.seen_loss
    assert seen is not None
    if not float(seen) or evaluation.loss_seen():
        return evaluation
    ratio = float(evaluation.returned_loss) / float(seen)
    evaluation = replace(evaluation, batch=evaluation.batch.scaled(ratio))
    return in_full_precision(evaluation) if evaluation.batch.mixed else evaluation
