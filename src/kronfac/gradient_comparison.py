"""The closure's gradient beside what K-FAC sees.

The gradient that the closure left is compared with two that K-FAC computes over the same examples: that of
the loss calls it has seen, by autograd, and the one rebuilt from the recorded uses, Σ g āᵀ. If the first
does not agree, the closure's loss has parts that K-FAC does not see, or its gradient is scaled; if only the
second does not, for some unit, there are uses of that unit that K-FAC does not see.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.curvature import SummedGradient, Taps
from kronfac.distributed import Part, Phase, Ranks
from kronfac.evaluation import Evaluation
from kronfac.gradient_memory import Verdict
from kronfac.linearization import Traced
from kronfac.network import Matrices, Network, Pass, Unit, dot, hooked

TOLERANCE, MIXED_TOLERANCE = 10.0, 0.2
"""How far gradients may differ relative to their size: in roots of the dtype's precision, 5e-3 in float32
and 2e-7 in float64; and as it is if the closure ran in half precision."""
ROUNDING = 64
"""What else they may differ by, in the dtype's precision times the size of what is summed: the gradients
of single examples, of which next to nothing is left near a minimum."""


Found = tuple[Matrices, list[Tensor | None], list[float], list[bool]]
"""Gradient of the loss calls, rebuilt gradient, sizes and half precision, by unit."""


def compare(evaluation: Evaluation, gradient: Matrices, unscaled: bool = False) -> Verdict | None:
    """Compare the closure's gradient with what K-FAC sees; `gradient` has no weight decay in it.

    If a GradScaler has `unscaled` it, its scale is far from 1 also in half precision.

    Units with parameters that have hooks are left out: somebody changes their gradients on purpose, also
    those of K-FAC's own passes, and nobody knows to what. None if the comparison says nothing: all units
    have hooks, numbers are not finite, or all digits are lost.
    """
    network, mixed = evaluation.network, evaluation.batch.mixed
    if all(hooked(unit.parameters) for unit in network.units):
        return None
    if mixed and not losses_agree(
        evaluation, float(evaluation.returned_loss), float(evaluation.loss)
    ):
        return None
    own = _gradients(network, evaluation.batch.passes)
    _sum_over_ranks(evaluation.spread.world, own)
    found = zip(network.units, gradient, *own, strict=True)
    free = [part for part in found if not hooked(part[0].parameters)]
    units, gradient, seen, rebuilt, summed, half = zip(*free, strict=True)
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
        return Verdict(others=_differing(units, gradient, seen, allowed[0], noises))
    known = [s if r is None else r for s, r in zip(seen, rebuilt, strict=True)]
    noises = [rounding * part for part in summed]
    unseen = _differing(units, seen, known, MIXED_TOLERANCE if any(half) else tolerance, noises)
    if mixed and unscaled:
        scale = scale if scale > 0 else 1.0
    elif mixed:
        scale = _scale_in_half_precision(evaluation, scale)
    elif abs(scale - 1) <= allowed[0] + noise / square**0.5:
        scale = 1.0
    return Verdict(scale, unseen=unseen)


def _sum_over_ranks(world: Ranks, found: Found) -> None:
    """Sum both gradients and their sizes over the ranks, in place."""
    if world.size == 1:
        return
    seen, rebuilt, sizes, half = found
    known = [V for V in rebuilt if V is not None]
    parts = [Part(V) for V in (*seen, *known)]
    numbers = world.sum_(Phase.COMPARISON, parts, [*sizes, *map(float, half)])
    sizes[:] = numbers[: len(sizes)]
    half[:] = map(bool, numbers[len(sizes) :])


def _scale_in_half_precision(evaluation: Evaluation, scale: float) -> float:
    """The ratio of the losses, if the gradient is nearer to that than to 1; else 1.

    Half precision leaves too few digits of a gradient near a minimum to tell its scale from nothing.
    """
    seen = evaluation.seen_loss
    assert seen is not None
    ratio = float(evaluation.returned_loss) / float(seen) if float(seen) else 1.0
    if not 0 < ratio < math.inf or abs(ratio - 1) <= MIXED_TOLERANCE:
        return 1.0
    nearer = scale <= 0 or abs(math.log(scale / ratio)) < abs(math.log(scale))
    return ratio if nearer else 1.0


def _differing(
    units: Sequence[Unit],
    expected: Sequence[Tensor],
    found: Sequence[Tensor],
    tolerance: float,
    noises: Sequence[float],
) -> tuple[str, ...]:
    """The parameters for which two vectors differ by more than their size and rounding allow."""
    names = []
    for unit, V, W, noise in zip(units, expected, found, noises, strict=True):
        for name, v, w in zip(unit.names, unit.split(V), unit.split(W), strict=True):
            if not _norm(v - w) <= tolerance * _norm(v) + noise:
                names.append(name)
    return tuple(names)


def _norm(V: Tensor) -> float:
    return float(V.double().norm())


def _gradients(network: Network, passes: Sequence[Pass]) -> Found:
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
            own, size = _rebuilt(taps, total[n])
            before = rebuilt[n]
            rebuilt[n] = own if own is None or before is None else before + own
            sizes[n] += size
    return tuple(total), rebuilt, sizes, [half] * len(total)


def unseen_uses(
    network: Network, view: Traced, vectors: Sequence[Tensor], taps: Sequence[Taps]
) -> list[int]:
    """The numbers of the units whose Jᵀ r is not the one rebuilt from their taps."""
    precision, units = torch.finfo(network.dtype).eps, []
    for n, (V, own) in enumerate(zip(view.vjp(vectors), taps, strict=True)):
        rebuilt, size = _rebuilt(own, V)
        allowed = TOLERANCE * precision**0.5 * _norm(V) + ROUNDING * precision * size
        if rebuilt is not None and _norm(V - rebuilt) > allowed:
            units.append(n)
    return units


def _rebuilt(taps: Taps, like: Tensor) -> tuple[Tensor | None, float]:
    """Σ g āᵀ of a unit, None if its uses are not known, and Σ ‖g‖ ‖ā‖."""
    if isinstance(taps, SummedGradient):
        return None, 0.0
    total = sum((tap.total() for tap in taps), torch.zeros_like(like))
    return total, sum(tap.magnitude() for tap in taps)


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


def losses_agree(evaluation: Evaluation, returned: float, seen: float) -> bool:
    """Whether the closure returned the loss that was seen; half precision has few digits of it."""
    if evaluation.batch.mixed and abs(returned - seen) <= MIXED_TOLERANCE * abs(seen):
        return True
    return evaluation.agrees(returned, seen)
