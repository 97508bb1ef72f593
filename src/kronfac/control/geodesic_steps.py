"""Levenberg–Marquardt with acceleration and momentum, for small problems of residuals: kronfac's own.

If J of all residuals fits in memory and the parameters are few, no factored inverse is needed. A step is
near the minimiser of

    h(θ + δ) + λ/2 (δ − μδ₀)ᵀD(δ − μδ₀),   D ∝ diag F + c mean(diag F) I   with a mean of 1.

D is Marquardt's scaling: a parameter that moves the residuals much is held back more. δ₀ is the last step,
as in SPRING (Goldshlager, Abrahamsen and Lin, 2024): a change of the step is held back, so that steps grow
along a valley. If residuals were linear in θ, the minimiser would be

    v = −(F + λD + ηI)⁻¹ (∇h − λμDδ₀).

Along v they bend by r″ = d²r(θ + t v)/dt², which to second order asks for

    δ = v + a/2,   a = −(F + λD + ηI)⁻¹ Jᵀ W r″          (Transtrum and Sethna, 2012)

for one more forward pass and a solution with the same decomposition. From there, corrections lead to the
minimiser, each for a forward pass and a solution,

    δ ← δ − (F + λD + ηI)⁻¹ (JᵀW r(θ + δ) + η(θ + δ) + λD(δ − μδ₀)),

with the J and the decomposition of θ, beside which passes are cheap. λ may be smaller by decades for it.

Each step is tried on its own mini-batch, without momentum if it fails, and then with a larger λ. So
mini-batches have to be the same in every step: this rule is for them alone.
"""

import math
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["settled", "slow", "diverged"]
"""How corrections end: little is left to be gained; they are many or slow; one has made it worse."""

SAME = 1e-4
"""Share of the objective by which two mini-batches differ at the most that are the same one."""


@dataclass(frozen=True)
class GeodesicSteps:
    """When steps are made with J itself, and what λ is in these steps.

        h(θ + δ) ≥ h(θ), μ > 0:            the same with μ = 0
        h(θ + δ) ≥ h(θ), μ = 0:            λ ← λ · factor, and another trial
        else if corrections diverged:      λ ← λ · factor
        else if they settled:              λ ← λ / factor, if it was the first trial

    Args:
        limit: parameters at the most; a matrix of that size is decomposed in every trial.
        momentum: μ, the share of the last step that a step is held to; 0 for none.
        factor: by how much λ moves.
        floor: c, the share of the mean that every parameter's scale has.
        bend: the largest ‖a‖ / ‖v‖ of a step; beyond it v is outside of where it says anything.
        trials: in a step at the most. If none is good, the step is K-FAC's own.
        corrections: in a trial at the most.
        far: how many times h(θ) the sum may be before the first of them; after it, it has to fall.
        settled: what the next one promises, as a share of the decrease of h, below which they end.
        shrink: what it promises, as a share of what the last one did, above which they end.
    """

    limit: int = 2048
    momentum: float = 0.7
    factor: float = 3.0
    floor: float = 0.01
    bend: float = 1.0
    trials: int = 10
    corrections: int = 6
    far: float = 1000.0
    settled: float = 0.1
    shrink: float = 0.5

    def __post_init__(self) -> None:
        for name in ("limit", "trials"):
            if getattr(self, name) < 1:
                raise ValueError(f"GeodesicSteps's {name} is 1 or more; got {getattr(self, name)}.")
        if self.corrections < 0:
            raise ValueError(f"GeodesicSteps's corrections is 0 or more; got {self.corrections}.")
        if not 0 <= self.momentum < 1:
            raise ValueError(
                f"GeodesicSteps's momentum is at least 0 and below 1; got {self.momentum}."
            )
        for name in ("factor", "far"):
            if not 1 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"GeodesicSteps's {name} is above 1, and finite; got {getattr(self, name)}."
                )
        for name in ("settled", "shrink"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(
                    f"GeodesicSteps's {name} is between 0 and 1; got {getattr(self, name)}."
                )
        for name in ("floor", "bend"):
            if not getattr(self, name) > 0:
                raise ValueError(f"GeodesicSteps's {name} is positive; got {getattr(self, name)}.")

    def after(self, outcome: Outcome, trials: int) -> float:
        """Factor of λ after a step that is taken, the last of so many trials."""
        if outcome == "diverged":
            return self.factor
        return 1 / self.factor if outcome == "settled" and trials == 1 else 1.0
