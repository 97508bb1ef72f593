"""λ by how much of a step's promise the next mini-batch sees kept; kronfac's own way to [MG15 §6.5]."""

import math
from dataclasses import dataclass
from typing import ClassVar

NEGLIGIBLE = 0.999
"""Share of the curvature that is not λ's above which a smaller λ would change nothing. A λ that fell
on and on here would be decades from where it acts when it is wanted again."""


@dataclass(frozen=True)
class AdaptiveDamping:
    """λ ← λ exp(−rate (ρ − target · s)), by a factor of 10 at the most.

    ρ is that of the last step with the objective on the next mini-batch, whose rows the step was not
    fitted to: it falls short of 1 by what the quadratic model misses and by what is noise of the
    mini-batch alike. s is the share of the model's curvature along the step that is not λ's. A λ that is
    far too large has ρ → 2, one at which training gains nothing on fresh cases has ρ → 0.

    Args:
        lambda_: where the search for the first λ starts, which takes a few trial steps on the first
            mini-batch; None for the mean curvature.
        interval: iterations from one measurement of ρ to the next; each costs a forward pass.
        settling: so many iterations at the start measure ρ every time.
        target: of ρ/s where mini-batches differ. Small, for a step that gains little at once may gain
            in the long run: what is lost to noise along steep directions is soon regained, what is
            gained along flat ones stays.
        exact_target: of ρ/s where they don't, as with the whole data set in each.
        rate: of the movement.
    """

    lambda_: float | None = None
    interval: int = 5
    settling: int = 20
    target: float = 0.05
    exact_target: float = 0.5
    rate: float = 2.0
    searches: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lambda_ is not None and not 0 < self.lambda_ < math.inf:
            raise ValueError(
                f"AdaptiveDamping's λ is positive and finite, or None; got {self.lambda_}."
            )
        if self.interval < 1:
            raise ValueError(f"AdaptiveDamping's interval is 1 or more; got {self.interval}.")
        if self.settling < 0:
            raise ValueError(f"AdaptiveDamping's settling is 0 or more; got {self.settling}.")
        for name in ("target", "exact_target"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"AdaptiveDamping's {name} lies in [0, 1); got {getattr(self, name)}."
                )
        if not 0 < self.rate < math.inf:
            raise ValueError(f"AdaptiveDamping's rate is positive and finite; got {self.rate}.")

    def measures(self, iteration: int) -> bool:
        return False

    def updated(self, lambda_: float, rho: float) -> float:
        return lambda_

    def judges(self, iteration: int) -> bool:
        return 1 < iteration <= self.settling or iteration % self.interval == 0

    def judged(self, lambda_: float, rho: float, share: float, noisy: bool) -> float:
        if math.isnan(rho):
            return 10 * lambda_
        target = self.target if noisy else self.exact_target
        excess = self.rate * (rho - target * share)
        if excess > 0 and share > NEGLIGIBLE:
            return lambda_
        return lambda_ * min(max(math.exp(-max(excess, -3.0)), 0.1), 10.0)
