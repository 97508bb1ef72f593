"""γ by the sampling error of the factors, or by trial; kronfac's own way to [MG15 §6.6]."""

import math
from dataclasses import dataclass, replace

from kronfac.control.adaptive_damping import LARGEST_FACTOR
from kronfac.control.base import PACE, TRUST, Measurement
from kronfac.control.gamma_rule import GammaRule, GammaState, tied_gamma
from kronfac.curvature.curvature import CEILING

FASTER, FASTEST = 1.5, 4.0
"""Factor of the search's pace after a success, and the largest pace, in units of the paper's."""
LONGEST_AGE = 1000
"""Iterations since the last refresh that count for how far γ moves: higher powers overflow."""
LEAST_TRIED = 1e-3
"""Smallest γ that is tried, in units of √curvature: it keeps the damped factors of ordinary networks within
reach of a float32 Cholesky decomposition. With more digits it is smaller, by the root of what ε is."""
SINGLE = 2.0**-23
"""ε of float32."""
LEAST_SURE = 1e-2
"""Smallest γ by the sampling error, in the same units: a network that fits all its examples has next to no
curvature left, and steps from mini-batches there throw out single examples that are not among them."""
FIRST_ITERATIONS = round(1 / (1 - CEILING))
"""Iterations in which the moving averages fill up, before they forget."""


@dataclass(frozen=True)
class AdaptiveGammaState(GammaState):
    """γ, and where the search goes next."""

    move: float = 1.0
    """m, the exponent of the next try in units of the paper's pace; negative for a larger γ."""
    curvature: float | None = None
    """Mean curvature at the first refresh, which says in what units the objective is."""


@dataclass(frozen=True)
class AdaptiveGamma(GammaRule[AdaptiveGammaState]):
    """The γ that M(δ) prefers while M is to be trusted; then one as large as the factors' sampling error.

    While the quadratic model's predictions hold on the next mini-batch, every refresh of the inverse also
    tries one other γ and keeps the better of the two, by M(δ). The other one is γ · factor^(m n),
    n iterations after the last refresh; m starts as 1, which is the paper's pace. If the other value is
    better, the next try goes faster the same way, m ← 3/2 m up to 4; if not, the other way, m ← ∓1. So the
    search costs one extra refresh, and still covers decades.

    M on a mini-batch rewards what fits its noise, and so ever smaller γ. Once the next mini-batches confirm
    less than `trusted` of what M predicts,

        γ² = strength² · mean of tr(A) tr(G) / n²,

    the mean being the damping that makes up for the moving averages' having been estimated from n examples
    (`sampling_error`). In the first iterations, when n is small, γ does not rise by it.

    γ follows λ if λ moves fast: after a change by more than `drift` the inverse is refreshed at once, and
    √(λ + η) is the other value.

    Args:
        strength: γ in units of the sampling error's root; None to search by M(δ) always.
        factor: per iteration; the paper's √(19/20) [MG15 §6.6].
        drift: the change of λ, a factor.
        trusted: the share of M's predictions.
        minimum: the smallest γ that is tried; None for √η or, if that is larger, 1e-3 of the root of the
            mean curvature (4e-8 in float64; by the sampling error, 1e-2), now or at the first refresh.
    """

    strength: float | None = 2.5
    factor: float = PACE**0.5
    drift: float = LARGEST_FACTOR
    trusted: float = TRUST
    minimum: float | None = None

    def __post_init__(self) -> None:
        if self.strength is not None and not 0 < self.strength < math.inf:
            raise ValueError(
                f"AdaptiveGamma's strength is positive and finite, or None; got {self.strength}."
            )
        if not 0 < self.factor < 1:
            raise ValueError(f"AdaptiveGamma's factor lies in (0, 1); got {self.factor}.")
        if not self.drift > 1:
            raise ValueError(f"AdaptiveGamma's drift is a factor above 1; got {self.drift}.")
        if not 0 <= self.trusted <= 1:
            raise ValueError(f"AdaptiveGamma's trusted lies in [0, 1]; got {self.trusted}.")
        if self.minimum is not None and not 0 < self.minimum < math.inf:
            raise ValueError(
                f"AdaptiveGamma's minimum is positive and finite, or None; got {self.minimum}."
            )

    def init(self, m: Measurement) -> AdaptiveGammaState:
        return AdaptiveGammaState(max(tied_gamma(m), self.minimum or 0.0))

    def candidates(self, state: AdaptiveGammaState, m: Measurement) -> tuple[float, ...]:
        digits = min(math.sqrt(m.precision / SINGLE), 1.0)
        gamma, floor = state.gamma, self._floor(state, m, LEAST_TRIED * digits)
        if m.iteration == 1:
            return (max(gamma, floor),)
        if (
            self.strength is not None
            and m.confidence < self.trusted
            and m.sampling_error is not None
        ):
            sure = self.strength * math.sqrt(m.sampling_error)
            sure = max(sure, self._floor(state, m, LEAST_SURE))
            return (min(sure, gamma) if m.iteration <= FIRST_ITERATIONS else sure,)
        age = min(m.inverse_age, LONGEST_AGE)
        other = tied_gamma(m) if m.drifted else gamma * self.factor ** (state.move * age)
        other = max(other, floor)
        if other == gamma:  # at the floor, from where there is only up
            other = gamma / self.factor**age
        return gamma, other

    def update(self, state: AdaptiveGammaState, m: Measurement) -> AdaptiveGammaState:
        moved = replace(state, gamma=m.gamma, curvature=state.curvature or m.mean_curvature)
        if len(m.candidates) < 2:
            return moved  # nothing was tried
        first, second = m.candidates
        tried = 1.0 if second < first else -1.0
        if m.gamma != second:
            return replace(moved, move=-tried)
        return replace(moved, move=tried * min(FASTER * abs(state.move), FASTEST))

    def due(self, state: AdaptiveGammaState, m: Measurement) -> bool:
        if m.inverse_lambda is None:
            return False
        if m.inverse_lambda == 0 or m.lambda_ == 0:
            return m.inverse_lambda != m.lambda_
        # More than `drift`: a rejected step moves λ by 10, for a while, and γ would not come back.
        return abs(math.log(m.lambda_ / m.inverse_lambda)) > math.log(self.drift) + 1e-9

    def _floor(self, state: AdaptiveGammaState, m: Measurement, share: float) -> float:
        """The smallest γ. Curvature that grows, or that vanishes, leaves it no smaller than it was."""
        if self.minimum is not None:
            return self.minimum
        curvature = max(state.curvature or 0.0, m.mean_curvature or 0.0)
        return max(math.sqrt(m.weight_decay), share * math.sqrt(curvature))
