"""Momentum with a long memory, where steps are mostly noise; kronfac's own addition to [MG15 §7].

Where the next mini-batches confirm little of what M predicts, a step fits the noise of its own one. What
all mini-batches agree on is small beside that, and shows in the sum of many steps only. M does not see it:
on each single mini-batch there is more to gain by undoing what the last one did. There the step is

    δ = κα Δ + μ u,   u ← c κα Δ + μ u,   α = argmin M(αΔ),   μ = 1 − 1/h

Of the best step along Δ a part, κ, which holds the steep directions; and u, what is left of a part, c, of
the ones before, h of them. Noise adds up like the root of their number. What they agree on adds up to
1 + c (h − 1) steps, so that along flat directions this is as much faster than κα Δ alone. As in Nesterov's
method the memory grows with the iterations. With c = 1 it would be the ordinary heavy ball, in which steep
directions swing for h iterations; the smaller c is, the more of them κα Δ stops first.
"""

import math
from dataclasses import dataclass

from kronfac.step_size.quadratic_form import Matrix, Vector, quadratic_form

KEPT = 0.5
"""Of what M predicts for its own (α, μ), the share that has to be left."""
NOISE, TRUST = 0.25, 0.5
"""Of what M predicts, the part confirmed at which steps are noise, and at which M is trusted."""


@dataclass(frozen=True)
class LongMemory:
    """How much of a step is taken and remembered where a quarter of what M predicts is confirmed, or less.

    Args:
        taken: κ.
        kept: c, of that.
        share: h, of the iterations so far.
        longest: the largest h; the paper averages its iterates over as many [MG15 §13].
    """

    taken: float = 0.5
    kept: float = 0.3
    share: float = 0.15
    longest: float = 100.0

    def __post_init__(self) -> None:
        for name in ("taken", "kept", "share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"LongMemory's {name} lies in (0, 1]; got {getattr(self, name)}.")
        if not 1 <= self.longest < math.inf:
            raise ValueError(f"LongMemory's longest is 1 or more; got {self.longest}.")

    def horizon(self, iteration: int) -> float:
        """h, 1 at the least."""
        return max(min(self.share * iteration, self.longest), 1.0)

    def blended(
        self, Q: Matrix, r: Vector, best: Vector, noise: float, iteration: int
    ) -> tuple[tuple[float, ...], float]:
        """The coefficients `noise` of the way from M's minimiser to this rule's, and c there.

        On that way M rises with the square of the distance: no farther than where `KEPT` of what it
        predicts is left.
        """
        slope, curvature = r[0], Q[0][0]
        if not curvature > 0:
            return tuple(best), 1.0
        long = [-self.taken * slope / curvature]
        if len(best) > 1:
            # What neither F, λ nor η sees has no part, as in the minimiser.
            long.append(1 - 1 / self.horizon(iteration) if Q[1][1] > 0 else 0.0)
        way = [there - here for there, here in zip(long, best, strict=True)]
        rise = quadratic_form(Q, way)
        allowed = (1 - KEPT) * quadratic_form(Q, best)  # twice −M at its minimiser, as `rise` is
        far = min(noise, math.sqrt(allowed / rise) if rise > allowed else 1.0)
        blend = tuple(here + far * step for here, step in zip(best, way, strict=True))
        return blend, 1 - far * (1 - self.kept)


def noise_of(confirmed: float) -> float:
    """From 0, where M is trusted, to 1."""
    return min(max((TRUST - confirmed) / (TRUST - NOISE), 0.0), 1.0)
