"""Rules for λ: fixed, the paper's, and kronfac's own [MG15 §6.5]."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from kronfac.control.acceptance import Acceptance
from kronfac.control.base import PACE, Measurement, Rule, require
from kronfac.storage import Storable


@dataclass(frozen=True)
class LambdaSearch:
    """The search for λ₀ on the first mini-batch, by trial steps with γ = √(λ + η).

    It finds the least damping at which a step still does what the quadratic model says. More damping would
    lower the objective faster at first, along the few steepest directions; training that starts there is
    slower for long afterwards.

    Args:
        trusted: ρ of a step that the model describes well enough: between the ¼ and the ¾ of [MG15 §6.5].
        factor: between the λ's of two trials.
        most_trials: trials at the most.
        least_curvature: the smallest λ in units of the mean curvature. By the curvature of the mini-batch
            that it was computed from, a step looks good with any damping; the next ones suffer from too
            little of it.
        below_decay: the smallest λ in units of η. A smaller one damps nothing that η does not.
    """

    trusted: float = 0.6
    factor: float = 10.0
    most_trials: int = 10
    least_curvature: float = 1e-3
    below_decay: float = 0.1

    def floor(self, mean_curvature: float, weight_decay: float) -> float:
        """The smallest λ that is tried."""
        return max(self.least_curvature * mean_curvature, self.below_decay * weight_decay)

    def least_trusted(
        self, rho: Callable[[float], float], start: float, floor: float = 0.0
    ) -> tuple[float, int]:
        """The λ at which ρ falls to `trusted`, and the number of trials.

        Downwards from `start` by `factor` while ρ(λ) is above, upwards until it is; then by interpolation
        in log λ between the last two. At `floor`, and after the last trial, the last λ. A ρ that is NaN
        says nothing: the λ before it.
        """
        trials, x, here = 1, start, rho(start)
        down = here >= self.trusted
        while trials < self.most_trials and not (down and x <= floor):
            following = max(x / self.factor, floor) if down else x * self.factor
            there = rho(following)
            trials += 1
            if math.isnan(here) or math.isnan(there):
                return x, trials
            if (there >= self.trusted) != down:
                above, other = (here, there) if down else (there, here)
                share = (above - self.trusted) / (above - max(other, 0.0))
                larger = max(x, following)
                return larger * (min(x, following) / larger) ** share, trials
            x, here = following, there
        return x, trials


@dataclass(frozen=True)
class DampingState(Storable):
    """λ. A rule that remembers more adds fields."""

    lambda_: float
    """NaN for one that the first step finds."""


D = TypeVar("D", bound=DampingState)


class DampingRule(Rule[D]):
    """How λ starts and moves [MG15 §6.5].

    `update` is called with every measurement of ρ: `m.rho`, `m.next_rho` or a rejection.
    """

    search: LambdaSearch | None = None
    """How the first step looks for a better λ; None leaves the first one as it is."""
    floored: bool = False
    """Whether λ₀ is raised to the floor that follows from the gradient, see `first_damping.py`."""
    reject: Acceptance | None = Acceptance()
    """When a step is validated out of turn and when it is rejected; None accepts every step."""

    def measures(self, iteration: int) -> Literal["own", "next"] | None:
        """Whether ρ is wanted at this iteration, which costs a forward pass.

        `"own"`: of the step that is being made, on its own mini-batch. `"next"`: of the last step, on the
        mini-batch of this one.
        """
        return None


AnyDampingRule = DampingRule[Any]


@dataclass(frozen=True)
class FixedDamping(DampingRule[DampingState]):
    """λ stays as it is.

    Args:
        lambda_: λ.
        reject: when steps are rejected; None accepts every step.
    """

    lambda_: float
    reject: Acceptance | None = field(default_factory=Acceptance)

    def __post_init__(self) -> None:
        require("λ is finite and not negative", self.lambda_, 0 <= self.lambda_ < math.inf)

    def init(self, m: Measurement) -> DampingState:
        return DampingState(self.lambda_)


GOOD, POOR = 3 / 4, 1 / 4
"""ρ above which λ falls and below which it rises [MG15 §6.5]."""


@dataclass(frozen=True)
class LevenbergMarquardtRule(DampingRule[DampingState]):
    """Every `interval` iterations: λ ← ω₁ λ if ρ > ¾, λ ← λ/ω₁ if ρ < ¼ or NaN; ω₁ = decay^interval.

    ρ is measured on the step's own mini-batch. A step that is rejected counts as ρ = NaN.

    Args:
        lambda_: the first λ, in the units of the objective's curvature.
        interval: T₁.
        decay: per iteration, so that λ falls at the same pace with any interval. The paper's is
            19/20.
        reject: when steps are rejected; None accepts every step.
    """

    lambda_: float = 1.0
    interval: int = 5
    decay: float = PACE
    reject: Acceptance | None = field(default_factory=Acceptance)

    def __post_init__(self) -> None:
        require("λ is finite and not negative", self.lambda_, 0 <= self.lambda_ < math.inf)
        require("LevenbergMarquardtRule's interval is 1 or more", self.interval, self.interval >= 1)
        require("LevenbergMarquardtRule's decay lies in (0, 1]", self.decay, 0 < self.decay <= 1)

    def init(self, m: Measurement) -> DampingState:
        return DampingState(self.lambda_)

    def measures(self, iteration: int) -> Literal["own", "next"] | None:
        return "own" if iteration % self.interval == 0 else None

    def update(self, state: DampingState, m: Measurement) -> DampingState:
        rho = math.nan if m.rejected else m.rho if m.next_rho is None else m.next_rho
        if rho is None or m.invisible:
            return state
        omega = self.decay**self.interval
        if math.isnan(rho) or rho < POOR:
            return replace(state, lambda_=state.lambda_ / omega)
        return replace(state, lambda_=state.lambda_ * omega) if rho > GOOD else state


NEGLIGIBLE = 0.999
"""Share of the curvature that is not λ's above which a smaller λ would change nothing. A λ that fell
on and on here would be decades from where it acts when it is wanted again."""
LARGEST_FACTOR = 10.0
"""Largest change of λ by one measurement, either way."""
LARGEST_RHO = 2.0
"""ρ above which it says no more against λ: the ρ of a step that is all λ's, along an exact gradient."""


@dataclass(frozen=True)
class AdaptiveDamping(DampingRule[DampingState]):
    """λ falls fast if λ holds steps back, slowly if all is well, and rises if predictions fail.

        ρ ≥ tolerated:  λ ← λ decayⁿ exp(−rate ρ (1 − s)),   n iterations since ρ was last measured
        ρ < tolerated:  λ ← λ exp(rate (tolerated − ρ)),     either by a factor of 10 at the most

    with ρ in [0, 2] in the first. λ does not fall if it makes up less than a thousandth of the curvature,
    nor rise for noise if it makes up more than half. A rejected step multiplies it by 10; a step that λ
    makes too short to change the loss visibly divides it by 10.

    ρ is that of the last step with the objective on the next mini-batch, from which the step was not
    computed: it falls short of 1 by what the quadratic model misses and by the noise of the mini-batch
    alike. s is the share of the model's curvature along the step that is not λ's.

    Args:
        lambda_: where the search for the first λ starts; None for the mean curvature.
        search: that search, which takes a few trial steps on the first mini-batch; None to leave λ where it
            starts. Either way λ₀ is not below a floor for saturated softmaxes and sigmoids, where the
            Fisher vanishes and the gradient does not (`first_damping.py`).
        interval: iterations from one measurement of ρ to the next; each costs a forward pass.
        settling: the number of iterations at the start that all measure ρ.
        decay: factor of λ per iteration if all is well; the paper's [MG15 §6.5].
        tolerated: ρ to put up with while mini-batches differ. With a gradient G and noise N in it, a full
            step has ρ = (G − N)/(G + N), which is above −1 however much is noise; and what is lost to noise
            along steep directions is soon regained, what is gained along flat ones stays.
        tolerated_exactly: the same if they don't, as with the whole data set in each; the paper's ¼.
        rate: exponent of the fast movements per unit of ρ.
        reject: when a step is validated out of turn and when it is rejected; None accepts every step.
    """

    lambda_: float | None = None
    interval: int = 5
    settling: int = 20
    decay: float = PACE
    tolerated: float = -0.5
    tolerated_exactly: float = POOR
    rate: float = 2.0
    search: LambdaSearch | None = field(default_factory=LambdaSearch)
    reject: Acceptance | None = field(default_factory=Acceptance)
    floored = True

    def __post_init__(self) -> None:
        first = self.lambda_
        name = "AdaptiveDamping's"
        require(
            f"{name} λ is positive and finite, or None",
            first,
            first is None or 0 < first < math.inf,
        )
        require(f"{name} interval is 1 or more", self.interval, self.interval >= 1)
        require(f"{name} settling is 0 or more", self.settling, self.settling >= 0)
        require(f"{name} decay lies in (0, 1]", self.decay, 0 < self.decay <= 1)
        for field_name in ("tolerated", "tolerated_exactly"):
            value = getattr(self, field_name)
            require(f"{name} {field_name} lies in [-1, 1)", value, -1 <= value < 1)
        require(f"{name} rate is positive and finite", self.rate, 0 < self.rate < math.inf)

    def init(self, m: Measurement) -> DampingState:
        return DampingState(math.nan if self.lambda_ is None else self.lambda_)

    def measures(self, iteration: int) -> Literal["own", "next"] | None:
        in_turn = iteration > 1 and (iteration <= self.settling or iteration % self.interval == 0)
        return "next" if in_turn else None

    def update(self, state: DampingState, m: Measurement) -> DampingState:
        return replace(state, lambda_=state.lambda_ * self._factor(m))

    def _factor(self, m: Measurement) -> float:
        if m.rejected:
            return LARGEST_FACTOR
        if m.invisible:
            # If λ dominates the curvature along the step, λ is the reason that it is so short.
            return 1 / LARGEST_FACTOR if m.lambda_dominates else 1.0
        rho = math.nan if m.next_rho is None else m.next_rho
        tolerated = self.tolerated if m.noisy else self.tolerated_exactly
        if rho < tolerated and not (m.noisy and m.lambda_dominates):
            exponent = min(self.rate * (tolerated - rho), math.log(LARGEST_FACTOR))
            return math.exp(exponent)
        if rho >= tolerated and m.curvature_share <= NEGLIGIBLE:
            held_back = self.rate * max(min(rho, LARGEST_RHO), 0.0) * (1 - m.curvature_share)
            return max(self.decay**m.elapsed * math.exp(-held_back), 1 / LARGEST_FACTOR)
        return 1.0
