"""Momentum that does not give way to the noise of a mini-batch; kronfac's own addition to [MG15 §7].

The last step δ₀ has fitted the noise of its own mini-batch, and M on the next one sees a gain in undoing
that. It is there, and it is short-lived: the next step undoes as much again, and of the way that all
mini-batches agree on little is left. So where the next mini-batches confirm little of what M predicts, μ is
not to fall below a certain value, as far as M agrees.
"""

import math
from collections.abc import Sequence

STEADY = 0.5
"""The least μ where nothing of what M predicts is confirmed, KFAC's own choice."""
KEPT = 0.5
"""Of what M predicts for its own (α, μ), the share that a steadier μ has to leave."""
LARGEST = 1.0
"""More than this, too, is noise."""
HALF = 0.5


def least_momentum(steady: float, confirmed: float) -> float:
    """From 0, where half of what M predicts is confirmed, to `steady`, where nothing is."""
    return steady * (1 - max(confirmed, 0.0) / HALF) if confirmed < HALF else 0.0


def steadied(
    Q: Sequence[Sequence[float]], r: Sequence[float], coefficients: Sequence[float], least: float
) -> tuple[float, ...]:
    """(α, μ) with μ in [least, 1], or as near to that as M allows, and the best α for it.

    With the best α for every μ, M is a parabola in μ around its minimiser μ*:

        M(μ) − M(μ*) = ½ s (μ − μ*)²,   s = Q₂₂ − Q₁₂²/Q₁₁
    """
    _, best = coefficients
    wanted = min(max(best, least), LARGEST)
    (a, b), (_, d) = Q
    slope, gain = r
    change = (slope * coefficients[0] + gain * best) / 2  # at a minimiser of M
    curvature = d - b * b / a if a > 0 else 0.0
    if wanted == best or not (curvature > 0 and change < 0):
        return tuple(coefficients)
    farthest = math.sqrt(2 * (1 - KEPT) * -change / curvature)
    mu = min(max(wanted, best - farthest), best + farthest)
    return -(slope + mu * b) / a, mu
