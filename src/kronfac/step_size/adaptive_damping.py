"""λ by how much of a step's promise the next mini-batch sees kept; kronfac's own way to [MG15 §6.5]."""

import math
from dataclasses import dataclass
from typing import ClassVar

from kronfac.step_size.levenberg_marquardt import Verdict

NEGLIGIBLE = 0.999
"""Share of the curvature that is not λ's above which a smaller λ would change nothing. A λ that fell
on and on here would be decades from where it acts when it is wanted again."""
DOMINATED = 0.5
"""Share below which most of the curvature is λ's already: noise makes ρ −s at the least, so that a lower
one is noise of the measurement, and says nothing for a larger λ."""
LARGEST_FACTOR = 10.0


@dataclass(frozen=True)
class AdaptiveDamping:
    """λ falls fast where it is λ that holds a step back, slowly where all is well, and rises where not.

        ρ ≥ tolerated:  λ ← λ decayⁿ exp(−rate ρ (1 − s)),   n iterations since ρ was last measured
        ρ < tolerated:  λ ← λ exp(rate (tolerated − ρ)),     either by a factor of 10 at the most

    with ρ in [0, 2] in the first. λ does not fall where it makes up less than a thousandth of the
    curvature, nor rise for noise where it makes up more than half.

    ρ is that of the last step with the objective on the next mini-batch, whose rows the step was not
    fitted to: it falls short of 1 by what the quadratic model misses and by what is noise of the
    mini-batch alike. s is the share of the model's curvature along the step that is not λ's.

    Args:
        lambda_: where the search for the first λ starts, which takes a few trial steps on the first
            mini-batch; None for the mean curvature.
        interval: iterations from one measurement of ρ to the next; each costs a forward pass.
        settling: so many iterations at the start measure ρ every time.
        decay: of λ where all is well, per iteration; the paper's [MG15 §6.5].
        tolerated: ρ where mini-batches differ. With a gradient G and noise N in it, a full step has
            ρ = (G − N)/(G + N), which is above −1 however much is noise; and what is lost to noise along
            steep directions is soon regained, what is gained along flat ones stays.
        tolerated_exactly: ρ where they don't, as with the whole data set in each; the paper's ¼.
        rate: of the fast movements.
    """

    lambda_: float | None = None
    interval: int = 5
    settling: int = 20
    decay: float = 19 / 20
    tolerated: float = -0.5
    tolerated_exactly: float = 0.25
    rate: float = 2.0
    searches: ClassVar[bool] = True
    suspects: ClassVar[bool] = True

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

    def measures(self, iteration: int) -> bool:
        return False

    def updated(self, lambda_: float, rho: float) -> float:
        return lambda_

    def judges(self, iteration: int) -> bool:
        return iteration > 1 and (iteration <= self.settling or iteration % self.interval == 0)

    def judged(self, lambda_: float, verdict: Verdict) -> float:
        if verdict.taken_back:
            return LARGEST_FACTOR * lambda_
        rho = verdict.rho
        if math.isnan(rho):
            return lambda_
        tolerated = self.tolerated if verdict.noisy else self.tolerated_exactly
        if rho < tolerated:
            if verdict.noisy and verdict.share < DOMINATED:
                return lambda_
            return lambda_ * min(math.exp(min(self.rate * (tolerated - rho), 9.0)), LARGEST_FACTOR)
        if verdict.share > NEGLIGIBLE:
            return lambda_
        held_back = self.rate * max(min(rho, 2.0), 0.0) * (1 - verdict.share)
        factor = self.decay**verdict.elapsed * math.exp(-held_back)
        return lambda_ * max(factor, 1 / LARGEST_FACTOR)
