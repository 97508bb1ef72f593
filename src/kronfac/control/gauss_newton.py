"""Levenberg–Marquardt with geodesic acceleration, for small problems of residuals; kronfac's own addition.

If J of all residuals fits in memory and the parameters are few, M has its minimiser over all directions,

    v = −(F + (λ + η)I)⁻¹ ∇h,

and no factored inverse is needed. What holds v back then is that residuals are not linear in θ. Along v
they bend by r″ = d²r(θ + t v)/dt², which to second order asks for a step of

    δ = v + a/2,   a = −(F + (λ + η)I)⁻¹ Jᵀ W r″          (Transtrum and Sethna, 2012)

for one more forward pass and a solution with the same decomposition. λ may be smaller by decades for it.

Each step is tried on its own mini-batch, and with a larger λ if the objective does not fall. So mini-batches
have to be the same in every step: this rule is for them alone.
"""

import math
from dataclasses import dataclass

SAME = 1e-4
"""Share of the objective by which two mini-batches differ at the most that are the same one."""


@dataclass(frozen=True)
class GaussNewton:
    """When M is minimised over all directions, and what λ is in these steps.

        ρ > good:          λ ← λ / factor          with ρ = (h(θ) − h(θ + δ)) / (½ vᵀFv − …), M without λ
        ρ < poor:          λ ← λ · factor
        no lower h:        λ ← λ · factor, and another trial

    Args:
        limit: parameters at the most; a matrix of that size is decomposed in every trial.
        good: ρ above which λ falls.
        poor: ρ below which λ rises.
        factor: by how much.
        bend: the largest ‖a‖ / ‖v‖ of a step; beyond it v is outside of where it says anything.
        trials: in a step at the most. If none is good, the step is K-FAC's own.
    """

    limit: int = 2048
    good: float = 0.5
    poor: float = 0.25
    factor: float = 3.0
    bend: float = 1.0
    trials: int = 10

    def __post_init__(self) -> None:
        for name in ("limit", "trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"GaussNewton's {name} is 1 or more; got {getattr(self, name)}.")
        if not 0 < self.poor <= self.good < 1:
            raise ValueError(
                f"GaussNewton needs 0 < poor ≤ good < 1; got {self.poor} and {self.good}."
            )
        if not 1 < self.factor < math.inf:
            raise ValueError(f"GaussNewton's factor is above 1, and finite; got {self.factor}.")
        if not self.bend > 0:
            raise ValueError(f"GaussNewton's bend is positive; got {self.bend}.")

    def after(self, rho: float) -> float:
        """Factor of λ after a step that is taken."""
        if rho > self.good:
            return 1 / self.factor
        return 1.0 if rho >= self.poor else self.factor
