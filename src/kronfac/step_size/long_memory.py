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

How much of that is too much shows in the average θ̄ of the iterates, in which noise cancels and which lags
behind. Where θ̄ has the lower loss, noise weighs more than progress, and h becomes shorter; where θ has,
longer again. If h = 1 is still too much, less than κ of a step is taken.
"""

import math
from dataclasses import dataclass

from kronfac.step_size.quadratic_form import Matrix, Vector, model_change

COST = 1 / 3
"""Of what M predicts for the part along Δ, what u may take back."""
NOISE, TRUST = 0.25, 0.5
"""Of what M predicts, the part confirmed at which steps are noise, and at which M is trusted."""
AVERAGING, COMPARING = 5, 20
"""Iterations from one that θ̄ takes in to the next, and from one comparison of θ̄ with θ to the next."""
LARGEST_FACTOR = 1.5
LEAST = 0.01
"""Of κ, what is taken in the end."""


@dataclass(frozen=True)
class Experience:
    """What the iterations so far say of the next step."""

    iteration: int = 1
    """Which it is."""
    confirmed: float = 1.0
    """Of what M predicted of late, the part that the next mini-batches saw come true."""
    memory: float = math.inf
    """h, at the most; below 1, the part of κ that is taken."""

    @property
    def noise(self) -> float:
        """From 0, where M is trusted, to 1."""
        return min(max((TRUST - self.confirmed) / (TRUST - NOISE), 0.0), 1.0)


NO_EXPERIENCE = Experience()


@dataclass(frozen=True)
class LongMemory:
    """How much of a step is taken and remembered where a quarter of what M predicts is confirmed, or less.

    Args:
        taken: κ.
        kept: c, of that.
        share: h at the most, of the iterations so far.
        longest: the largest h; the paper averages its iterates over as many [MG15 §13].
        averaged: what θ̄ is an average over, of the iterations so far.
    """

    taken: float = 0.5
    kept: float = 0.3
    share: float = 0.15
    longest: float = 100.0
    averaged: float = 0.2

    def __post_init__(self) -> None:
        for name in ("taken", "kept", "share", "averaged"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"LongMemory's {name} lies in (0, 1]; got {getattr(self, name)}.")
        if not 1 <= self.longest < math.inf:
            raise ValueError(f"LongMemory's longest is 1 or more; got {self.longest}.")

    def horizon(self, experience: Experience) -> float:
        """h, 1 at the least."""
        return max(self._limit(experience), 1.0)

    def statistics(self, experience: Experience) -> float:
        """Iterations that statistics remember: as long as h may be where steps are noise, else 1.

        Not shorter where h is: there the parameters go nowhere fast, and what is uncertain is the inverse.
        """
        return 1 + experience.noise * (self._ceiling(experience) - 1)

    def blended(
        self, Q: Matrix, r: Vector, best: Vector, experience: Experience
    ) -> tuple[tuple[float, ...], float]:
        """The coefficients, as far from M's minimiser to this rule's as noise says, and c there."""
        slope, curvature, noise = r[0], Q[0][0], experience.noise
        if not curvature > 0:
            return tuple(best), 1.0
        long = [-self.taken * min(self._limit(experience), 1.0) * slope / curvature]
        if len(best) > 1:
            long.append(min(1 - 1 / self.horizon(experience), self._affordable(Q, r, long[0])))
        blend = tuple(a + noise * (b - a) for a, b in zip(best, long, strict=True))
        return blend, 1 - noise * (1 - self.kept)

    def averages(self, iteration: int) -> bool:
        """Whether θ̄ takes in the parameters of this iteration."""
        return iteration % AVERAGING == 0

    def weight(self, iteration: int, start: int) -> float:
        """Of these parameters in θ̄, which began at iteration `start`: at first all count the same."""
        window = min(self.averaged * iteration, iteration - start + AVERAGING)
        return AVERAGING / max(window, AVERAGING)

    def compares(self, iteration: int, start: int) -> bool:
        """Whether θ̄ is compared with θ: not before it is as long an average as it should be."""
        return iteration % COMPARING == 0 and iteration - start >= self.averaged * iteration

    def compared(self, experience: Experience, better: bool) -> float:
        """The memory from here on, `better` being whether θ̄ has the lower loss.

        What has changed shows in θ̄ after as many iterations as it is an average over; h moves by a
        factor of e in these, or by less.
        """
        if not better and experience.memory >= self._ceiling(experience):
            return math.inf
        window = self.averaged * experience.iteration
        factor = math.exp(min(COMPARING / window, math.log(LARGEST_FACTOR)))
        memory = self._limit(experience) * (1 / factor if better else factor)
        return max(memory, LEAST)

    def _limit(self, experience: Experience) -> float:
        """h, or below 1 the part of κ that is taken."""
        return min(self._ceiling(experience), experience.memory)

    def _ceiling(self, experience: Experience) -> float:
        return max(min(self.share * experience.iteration, self.longest), 1.0)

    def _affordable(self, Q: Matrix, r: Vector, alpha: float) -> float:
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
