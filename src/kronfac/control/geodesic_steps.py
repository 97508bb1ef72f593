"""Levenberg–Marquardt with geodesic acceleration, for small problems of residuals; kronfac's own addition.

If J of all residuals fits in memory and the parameters are few, M has its minimiser over all directions,

    v = −(F + λD + ηI)⁻¹ ∇h,   D ∝ diag F + c mean(diag F) I   with a mean of 1,

and no factored inverse is needed. D is Marquardt's scaling: a parameter that moves the residuals much is
held back more. What holds v back is that residuals are not linear in θ. Along v they bend by
r″ = d²r(θ + t v)/dt², which to second order asks for a step of

    δ = v + a/2,   a = −(F + λD + ηI)⁻¹ Jᵀ W r″          (Transtrum and Sethna, 2012)

for one more forward pass and a solution with the same decomposition. λ may be smaller by decades for it.

Each step is tried on its own mini-batch, and with a larger λ if the objective does not fall. So
mini-batches have to be the same in every step: this rule is for them alone.
"""

import math
from dataclasses import dataclass

SAME = 1e-4
"""Share of the objective by which two mini-batches differ at the most that are the same one."""


@dataclass(frozen=True)
class GeodesicSteps:
    """When M is minimised over all directions, and what λ is in these steps.

        h(θ + δ) ≥ h(θ):          λ ← λ · factor, and another trial
        else if ρ < poor:         λ ← λ · factor
        else if ρ > good:         λ ← λ / factor, if it was the first trial

    with ρ = (h(θ + δ) − h(θ)) / (∇hᵀv + ½ vᵀ(F + ηI)v).

    Args:
        limit: parameters at the most; a matrix of that size is decomposed in every trial.
        good: ρ above which λ falls.
        poor: ρ below which λ rises.
        factor: by how much.
        floor: c, the share of the mean that every parameter's scale has.
        bend: the largest ‖a‖ / ‖v‖ of a step; beyond it v is outside of where it says anything.
        trials: in a step at the most. If none is good, the step is K-FAC's own.
    """

    limit: int = 2048
    good: float = 0.5
    poor: float = 0.25
    factor: float = 3.0
    floor: float = 0.01
    bend: float = 1.0
    trials: int = 10

    def __post_init__(self) -> None:
        for name in ("limit", "trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"GeodesicSteps's {name} is 1 or more; got {getattr(self, name)}.")
        if not 0 < self.poor <= self.good < 1:
            raise ValueError(
                f"GeodesicSteps needs 0 < poor ≤ good < 1; got {self.poor} and {self.good}."
            )
        if not 1 < self.factor < math.inf:
            raise ValueError(f"GeodesicSteps's factor is above 1, and finite; got {self.factor}.")
        for name in ("floor", "bend"):
            if not getattr(self, name) > 0:
                raise ValueError(f"GeodesicSteps's {name} is positive; got {getattr(self, name)}.")

    def after(self, rho: float, trials: int) -> float:
        """Factor of λ after a step that is taken, the last of so many trials."""
        if rho < self.poor:
            return self.factor
        return 1 / self.factor if rho > self.good and trials == 1 else 1.0
