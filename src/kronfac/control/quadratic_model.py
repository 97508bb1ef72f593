"""The step as the minimiser of the exact-Fisher quadratic model over a few directions [MG15 §6.4, §7].

    M(δ) − M(0) = ½ δᵀ(F + (λ + η)I)δ + ∇hᵀδ,   δ = Σ_j c_j v_j

For directions v_j that is ½ cᵀQc + rᵀc with Q_ij = v_iᵀ(F + (λ + η)I)v_j and r_j = ∇hᵀv_j: the
directions are Δ alone (c = α), or Δ and the previous update δ₀ (c = α, μ).
"""

import math
from dataclasses import dataclass, replace

from kronfac.control.base import Measurement
from kronfac.control.geodesic_steps import GeodesicSteps
from kronfac.control.long_memory import LongMemory
from kronfac.control.quadratic_form import Coefficients, Matrix, inner, model_change
from kronfac.control.step_rule import Step, StepRule, StepState

DEPENDENT = 64
"""ε of the entries of Q below which an eigenvalue of it, for directions of unit curvature, is noise."""


def minimiser(Q: Matrix, r: Coefficients, precision: float) -> tuple[float, ...]:
    """argmin ½ cᵀQc + rᵀc over one or two coefficients, the smallest minimiser if there are several.

    For directions of unit curvature Q is [[1, x], [x, 1]], with the eigenvalues 1 ± x along (1, ±1).
    """
    # A direction without curvature is a zero vector, or one that neither F, λ nor η sees: it has no part.
    scales = [math.sqrt(max(row[i], 0.0)) for i, row in enumerate(Q)]
    u, *v = (r_i / scale if scale > 0 else 0.0 for r_i, scale in zip(r, scales, strict=True))
    if not v:
        return (-u / scales[0] if scales[0] > 0 else 0.0,)
    both = scales[0] > 0 and scales[1] > 0
    x = Q[0][1] / scales[0] / scales[1] if both else 0.0
    cutoff = DEPENDENT * precision
    along = (u + v[0]) / 2 / (1 + x) if 1 + x > cutoff else 0.0
    across = (u - v[0]) / 2 / (1 - x) if 1 - x > cutoff else 0.0
    return tuple(
        -part / scale if scale > 0 else 0.0
        for part, scale in zip((along + across, along - across), scales, strict=True)
    )


def clip_to_objective(step: Step, objective: float, least: float = 0.0) -> tuple[Step, float]:
    """The part of the step that takes M from `objective` to `least`, if it would go below, and its share.

    Losses are not negative. On a few examples that are all but fitted the Fisher has hardly any curvature
    left, and the minimiser of M is far outside of where M says anything.

    At c δ, M has changed by c g + c² q/2 with g = ∇hᵀδ and q the curvature along δ.
    """
    if least > 0 and 0 <= objective <= least:
        nothing = (0.0,) * len(step.coefficients)
        return replace(step, coefficients=nothing, predicted_change=0.0, slope=0.0), 0.0
    if not 0 < objective - least < -step.predicted_change:
        return step, 1.0
    objective -= least
    slope = 2 * step.predicted_change if step.slope is None else step.slope
    curvature = 2 * (step.predicted_change - slope)
    # The smaller root of c g + c² q/2 = −objective, in the form that loses no digits.
    root = math.sqrt(max(slope**2 - 2 * curvature * objective, 0.0))
    share = 2 * objective / (-slope + root)
    cut = tuple(share * c for c in step.coefficients)
    bounded = replace(step, coefficients=cut, predicted_change=-objective, slope=share * slope)
    return bounded, share


def clip_to_radius(step: Step, curvature: float, radius: float) -> tuple[Step, float]:
    """The part of the step within a trust region, δᵀFδ ≤ radius², and its share.

    At c δ, M has changed by c g + c² q/2 with g = ∇hᵀδ and q the curvature along δ, λ's and η's included.
    """
    if not curvature > radius**2:
        return step, 1.0
    share = radius / math.sqrt(curvature)
    slope = 2 * step.predicted_change if step.slope is None else step.slope
    damped = 2 * (step.predicted_change - slope)
    clipped = replace(
        step,
        coefficients=tuple(share * c for c in step.coefficients),
        predicted_change=share * slope + share**2 * damped / 2,
        slope=share * slope,
    )
    return clipped, share


@dataclass(frozen=True)
class QuadraticModel(StepRule):
    """(α, μ) = argmin M: δ = αΔ + μδ₀, or δ = αΔ with `momentum=False`.

    With `bounded=True`, KFAC's own choice, a step along which M would become negative ends at M = 0.
    With `memory`, KFAC's own choice too, the step is another while the next mini-batches confirm less than
    half of what M predicts (`long_memory.py`). With `whole`, KFAC's own choice too, small problems of
    residuals have M minimised over all directions (`geodesic_steps.py`).

    Directions that are linearly dependent to rounding (δ₀ ≈ Δ, δ₀ = 0) make Q singular; its
    pseudo-inverse, taken after scaling every direction to unit curvature, then gives the smallest of
    the minimisers.
    """

    momentum: bool = True
    bounded: bool = False
    memory: LongMemory | None = None
    whole: GeodesicSteps | None = None

    @property
    def geodesic_steps(self) -> GeodesicSteps | None:
        """`whole`; None for conjugate gradients."""
        return self.whole if self.cg_steps == 1 else None

    @property
    def long_memory(self) -> LongMemory | None:
        """None for conjugate gradients, which go on from a minimiser of M."""
        return self.memory if self.momentum and self.cg_steps == 1 else None

    def solve(self, Q: Matrix, r: Coefficients, state: StepState, m: Measurement) -> Step:
        coefficients = minimiser(Q, r, m.precision)
        memory = self.long_memory
        if memory is None or memory.noise(m) == 0:
            return Step(coefficients, model_change(Q, r, coefficients))
        blend, kept = memory.blend(Q, r, coefficients, state.memory, m)
        return Step(blend, model_change(Q, r, blend), inner(r, blend), kept)
