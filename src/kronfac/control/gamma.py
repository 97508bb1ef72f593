"""Rules for γ: fixed, the paper's search, and kronfac's own [MG15 §6.6]."""

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from kronfac.control.base import PACE, TRUST, Measurement, Rule, require
from kronfac.control.damping import LARGEST_FACTOR
from kronfac.curvature.estimate import CEILING
from kronfac.storage import Storable


@dataclass(frozen=True)
class GammaState(Storable):
    """γ. A rule that remembers more adds fields."""

    gamma: float


G = TypeVar("G", bound=GammaState)


class GammaRule(Rule[G]):
    """How γ, the damping strength of the approximate Fisher, starts and moves [MG15 §6.6].

    `init` is called when λ is known. `update` is called after every step, with the γ that it was made with
    in `m.gamma` and those that were tried in `m.candidates`, if the inverse was refreshed.
    """

    @abstractmethod
    def candidates(self, state: G, m: Measurement) -> tuple[float, ...]:
        """The γ's to try if the inverse is refreshed, each different, the preferred one of equals first."""

    def update(self, state: G, m: Measurement) -> G:
        """γ as the step was made with."""
        return replace(state, gamma=m.gamma)

    def due(self, state: G, m: Measurement) -> bool:
        """Whether a refresh can't wait for its turn, λ having moved so far from `m.inverse_lambda`."""
        return False

    def check_interval(self, inverse_interval: int | None) -> None:  # a default
        """Refuse an inverse interval T₃ that this rule can't work with; None is one that grows."""


AnyGammaRule = GammaRule[Any]


def tied_gamma(m: Measurement) -> float:
    """√(λ + η): γ and λ as one damping strength [MG15 §6.3]."""
    return math.sqrt(m.lambda_ + m.weight_decay)


@dataclass(frozen=True)
class FixedGamma(GammaRule[GammaState]):
    """γ stays as it is; without a value, as √(λ₀ + η)."""

    gamma: float | None = None

    def __post_init__(self) -> None:
        given = self.gamma
        require("γ is finite and not negative", given, given is None or 0 <= given < math.inf)

    def init(self, m: Measurement) -> GammaState:
        return GammaState(tied_gamma(m) if self.gamma is None else self.gamma)

    def candidates(self, state: GammaState, m: Measurement) -> tuple[float, ...]:
        return (state.gamma,)


FLOOR = 1e-4
"""Smallest γ without weight decay, which gives no natural floor: it keeps the damped factors of ordinary
networks within reach of a float32 Cholesky decomposition."""


@dataclass(frozen=True)
class GammaSearch(GammaRule[GammaState]):
    """Every `interval` iterations the best of γ, ω₂γ and γ/ω₂; ω₂ = factor^interval.

    Starts at √(λ + η).

    Args:
        interval: T₂, a multiple of the inverse interval T₃.
        factor: per iteration; the paper's is √(19/20).
        minimum: the smallest γ that is tried; None for √η, or 1e-4 if that is larger.
        maximum: the largest one that is tried. The authors' program has 1, which also means that a
            larger γ is compared with 1 instead of γ/ω₂.
    """

    interval: int = 20
    factor: float = PACE**0.5
    minimum: float | None = None
    maximum: float = math.inf

    def __post_init__(self) -> None:
        require("GammaSearch's interval is 1 or more", self.interval, self.interval >= 1)
        require("GammaSearch's factor lies in (0, 1)", self.factor, 0 < self.factor < 1)
        if not 0 < (FLOOR if self.minimum is None else self.minimum) <= self.maximum:
            raise ValueError(
                f"GammaSearch needs 0 < minimum ≤ maximum (minimum None is at least {FLOOR}); got "
                f"{self.minimum} and {self.maximum}."
            )

    def init(self, m: Measurement) -> GammaState:
        return GammaState(max(tied_gamma(m), self._minimum(m.weight_decay)))

    def candidates(self, state: GammaState, m: Measurement) -> tuple[float, ...]:
        gamma = state.gamma
        if m.iteration % self.interval:
            return (gamma,)
        omega = self.factor**self.interval
        smaller = max(omega * gamma, self._minimum(m.weight_decay))
        larger = min(gamma / omega, self.maximum)
        # γ first: of equals it stays. At a bound two of the three coincide.
        return tuple(dict.fromkeys((gamma, smaller, larger)))

    def check_interval(self, inverse_interval: int | None) -> None:
        if inverse_interval is None or self.interval % inverse_interval:
            raise ValueError(
                f"GammaSearch's interval T₂ must be a multiple of inverse_interval T₃ [MG15 §6.6]; got "
                f"{self.interval} and {inverse_interval}."
            )

    def _minimum(self, weight_decay: float) -> float:
        if self.minimum is not None:
            return self.minimum
        return max(math.sqrt(weight_decay), FLOOR)


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
        name = "AdaptiveGamma's"
        for field_name in ("strength", "minimum"):
            value = getattr(self, field_name)
            holds = value is None or 0 < value < math.inf
            require(f"{name} {field_name} is positive and finite, or None", value, holds)
        require(f"{name} factor lies in (0, 1)", self.factor, 0 < self.factor < 1)
        require(f"{name} drift is a factor above 1", self.drift, self.drift > 1)
        require(f"{name} trusted lies in [0, 1]", self.trusted, 0 <= self.trusted <= 1)

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
