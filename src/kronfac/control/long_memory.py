"""Momentum with a long memory, for steps that are mostly noise; kronfac's own addition to [MG15 §7].

If the next mini-batches confirm little of what M predicts, a step fits the noise of its own one. What all
mini-batches agree on is small beside that, and shows in the sum of many steps only. M does not see it: on
each single mini-batch there is more to gain by undoing what the last one did. Then the step is

    δ = κα Δ + μ u,   u ← c κα Δ + μ u,   α = argmin M(αΔ),   μ = 1 − 1/h

A part, κ, of the best step along Δ, which holds the steep directions; and u, what is left of a part, c, of
the h steps before. Noise adds up like the root of their number. What they agree on adds up to
1 + c (h − 1) steps, so that along flat directions this is as much faster than κα Δ alone. As in Nesterov's
method the memory grows with the iterations. With c = 1 it would be the ordinary heavy ball, in which steep
directions swing for h iterations; the smaller c is, the more of them κα Δ stops first.

How much of that is too much shows in the average θ̄ of the iterates, in which noise cancels and which lags
behind. If θ̄ has the lower loss, noise weighs more than progress, and h becomes shorter; if θ has, longer
again. If h = 1 is still too much, less than κ of a step is taken.
"""

import math
from dataclasses import dataclass, replace

from kronfac.control.base import (
    ROUNDING,
    TRUST,
    Coefficients,
    Matrix,
    Measurement,
    ParameterVector,
    model_change,
    require,
)
from kronfac.storage import Storable

COST = 1 / 3
"""Share of what M predicts for the part along Δ that u may give up."""
NOISE = TRUST / 2
"""Part of M's predictions confirmed below which steps count as noise."""
AVERAGING, COMPARING = 5, 20
"""Iterations from one that θ̄ takes in to the next, and from one comparison of θ̄ with θ to the next."""
LONGEST_STRIDE = 1.5
"""Largest factor of h at one comparison."""
LEAST_TAKEN = 0.01
"""Smallest share of κ that is taken in the end."""


@dataclass(frozen=True)
class MemoryState(Storable):
    """What `LongMemory` remembers."""

    length: float = math.inf
    """h at the most; below 1, the share of κ that is taken."""
    average: ParameterVector | None = None
    """θ̄, the average of recent iterates, while mini-batches are noisy."""
    start: int = 0
    """The iteration at which θ̄ began."""


NO_MEMORY = MemoryState()
"""What is remembered while M is trusted."""


@dataclass(frozen=True)
class LongMemory:
    """How much of a step is taken and remembered if a quarter of what M predicts is confirmed, or less.

    Args:
        taken: κ.
        kept: c, the share of that which is remembered.
        share: h at the most, as a share of the iterations so far.
        longest: the largest h; the paper averages its iterates over as many [MG15 §13].
        averaged: what θ̄ is an average over, as a share of the iterations so far; None for no θ̄: h is then
            as long as it may be.
    """

    taken: float = 0.5
    kept: float = 0.3
    share: float = 0.15
    longest: float = 100.0
    averaged: float | None = 0.2

    def __post_init__(self) -> None:
        for name in ("taken", "kept", "share", "averaged"):
            value = getattr(self, name)
            holds = (name == "averaged" and value is None) or 0 < value <= 1
            require(f"LongMemory's {name} lies in (0, 1]", value, holds)
        require("LongMemory's longest is 1 or more", self.longest, 1 <= self.longest < math.inf)

    def noise(self, m: Measurement) -> float:
        """From 0, if M is trusted, to 1, if steps are noise."""
        return min(max((TRUST - m.confidence) / (TRUST - NOISE), 0.0), 1.0)

    def horizon(self, state: MemoryState, m: Measurement) -> float:
        """h, 1 at the least."""
        return max(self._limit(state, m), 1.0)

    def statistics(self, m: Measurement) -> float:
        """Iterations that statistics remember: as long as h may be if steps are noise, else 1.

        Not shorter if h is: the parameters then go nowhere fast, and what is uncertain is the inverse.
        """
        return 1 + self.noise(m) * (self._ceiling(m) - 1)

    def blend(
        self, Q: Matrix, r: Coefficients, best: Coefficients, state: MemoryState, m: Measurement
    ) -> tuple[tuple[float, ...], float]:
        """The coefficients, as far from M's minimiser to this rule's as noise says, and c there."""
        slope, curvature, noise = r[0], Q[0][0], self.noise(m)
        if not curvature > 0:
            return tuple(best), 1.0
        long = [-self.taken * min(self._limit(state, m), 1.0) * slope / curvature]
        if len(best) > 1:
            long.append(min(1 - 1 / self.horizon(state, m), self._affordable(Q, r, long[0])))
        blend = tuple(a + noise * (b - a) for a, b in zip(best, long, strict=True))
        return blend, 1 - noise * (1 - self.kept)

    # --------------------------------------------------------------------- the average of the iterates

    def compares(self, state: MemoryState, m: Measurement) -> bool:
        """Whether θ̄ is compared with θ: not before it is as long an average as it should be."""
        if self.averaged is None or state.average is None:
            return False
        k = m.iteration
        return k % COMPARING == 0 and k - state.start >= self.averaged * k

    def compare(self, state: MemoryState, m: Measurement, change: float) -> MemoryState:
        """The memory from here on, `change` being h(θ̄) − h(θ) on this mini-batch.

        What has changed shows in θ̄ after as many iterations as it is an average over; h moves by a factor
        of e in these, or by less.
        """
        if self.averaged is None or m.loss is None or not math.isfinite(change):
            return state
        if abs(change) <= ROUNDING * m.precision * abs(m.loss):
            return state
        better = change < 0
        if not better and state.length >= self._ceiling(m):
            return replace(state, length=math.inf)
        window = self.averaged * m.iteration
        factor = math.exp(min(COMPARING / window, math.log(LONGEST_STRIDE)))
        length = self._limit(state, m) * (1 / factor if better else factor)
        return replace(state, length=max(length, LEAST_TAKEN))

    def averages(self, m: Measurement) -> bool:
        """Whether θ̄ takes in the parameters of this iteration."""
        return self.averaged is not None and m.iteration % AVERAGING == 0

    def average(
        self, state: MemoryState, m: Measurement, theta: ParameterVector | None
    ) -> MemoryState:
        """The memory with θ in θ̄, if `averages` asked for it."""
        if theta is None:
            return state
        if state.average is None:
            return replace(state, average=theta, start=m.iteration)
        weight = self.weight(m.iteration, state.start)
        pairs = zip(state.average, theta, strict=True)
        return replace(state, average=tuple(old.lerp(new, weight) for old, new in pairs))

    def weight(self, iteration: int, start: int) -> float:
        """Weight of these parameters in θ̄, which began at `start`: at first all count the same."""
        assert self.averaged is not None
        window = min(self.averaged * iteration, iteration - start + AVERAGING)
        return AVERAGING / max(window, AVERAGING)

    def _limit(self, state: MemoryState, m: Measurement) -> float:
        """h, or below 1 the share of κ that is taken."""
        return min(self._ceiling(m), state.length)

    def _ceiling(self, m: Measurement) -> float:
        return max(min(self.share * m.iteration, self.longest), 1.0)

    def _affordable(self, Q: Matrix, r: Coefficients, alpha: float) -> float:
        """The largest μ at which u, added to αΔ, does not cost more than `COST` allows.

        M's own minimiser is no measure of that: on a single mini-batch it undoes what the ones before
        agreed on, many times over where that is flat.
        """
        curvature = Q[1][1]
        if not curvature > 0:
            return 0.0  # what neither F, λ nor η sees has no part, as in the minimiser
        slope = r[1] + alpha * Q[0][1]
        room = -COST * model_change([Q[0][:1]], r[:1], (alpha,))
        # The positive root of μ slope + ½ μ² curvature = room, in the form that loses no digits.
        root = math.hypot(slope, math.sqrt(2 * curvature * room))
        return 2 * room / (slope + root) if slope > 0 else (root - slope) / curvature
