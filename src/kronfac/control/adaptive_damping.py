"""λ by how much of a step's promise the next mini-batch sees kept; kronfac's own way to [MG15 §6.5]."""

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from kronfac.control.base import PACE, Measurement
from kronfac.control.damping_rule import DampingRule, DampingState
from kronfac.control.lambda_search import LambdaSearch
from kronfac.control.levenberg_marquardt import POOR

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
            starts.
        interval: iterations from one measurement of ρ to the next; each costs a forward pass.
        settling: the number of iterations at the start that all measure ρ.
        decay: factor of λ per iteration if all is well; the paper's [MG15 §6.5].
        tolerated: ρ to put up with while mini-batches differ. With a gradient G and noise N in it, a full
            step has ρ = (G − N)/(G + N), which is above −1 however much is noise; and what is lost to noise
            along steep directions is soon regained, what is gained along flat ones stays.
        tolerated_exactly: the same if they don't, as with the whole data set in each; the paper's ¼.
        rate: exponent of the fast movements per unit of ρ.
    """

    lambda_: float | None = None
    interval: int = 5
    settling: int = 20
    decay: float = PACE
    tolerated: float = -0.5
    tolerated_exactly: float = POOR
    rate: float = 2.0
    search: LambdaSearch | None = field(default_factory=LambdaSearch)

    def __post_init__(self) -> None:
        if self.lambda_ is not None and not 0 < self.lambda_ < math.inf:
            raise ValueError(
                f"AdaptiveDamping's λ is positive and finite, or None; got {self.lambda_}."
            )
        if self.interval < 1:
            raise ValueError(f"AdaptiveDamping's interval is 1 or more; got {self.interval}.")
        if self.settling < 0:
            raise ValueError(f"AdaptiveDamping's settling is 0 or more; got {self.settling}.")
        if not 0 < self.decay <= 1:
            raise ValueError(f"AdaptiveDamping's decay lies in (0, 1]; got {self.decay}.")
        for name in ("tolerated", "tolerated_exactly"):
            if not -1 <= getattr(self, name) < 1:
                raise ValueError(
                    f"AdaptiveDamping's {name} lies in [-1, 1); got {getattr(self, name)}."
                )
        if not 0 < self.rate < math.inf:
            raise ValueError(f"AdaptiveDamping's rate is positive and finite; got {self.rate}.")

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
