"""Was the last step a good one, if its loss is not known? By the gradients at both ends of it.

Of a loop that calls `backward()` on a loss that K-FAC does not see, gradients are all that is known. With δ
the step, and ∇h at θ on its own mini-batch and at θ + δ on the next one, the trapezoidal rule has

    h(θ + δ) − h(θ) ≈ ½ (s₀ + s₁),   s₀ = ∇h(θ)ᵀδ,   s₁ = ∇h(θ + δ)ᵀδ,

exact for a quadratic h. If the gradient is G and noise N in the model's metric, a full step has
s₀ = −(G + N) and s₁ = N: noise alone makes the change 0, and never a rise. A step that ends where units are
saturated has s₁ ≈ 0 however high the loss is there; what tells of it is that the gradient has grown.
"""

import math
from dataclasses import dataclass, replace

from kronfac.control.acceptance import DECAY, Acceptance, AcceptanceState, Pending, Verdict
from kronfac.control.base import Measurement
from kronfac.control.damping_rule import AnyDampingRule
from kronfac.ranges import NotNegative

GROWTH = 4.0
"""Times that ‖∇h‖ may grow in a step: for least squares the loss is then about sixteen times as high."""


@dataclass(frozen=True)
class Slope:
    """The gradient on one mini-batch, along a step and by itself."""

    along: float
    """∇hᵀδ."""
    size: NotNegative
    """‖∇h‖; per example, if the loss is a sum."""


@dataclass(frozen=True)
class SlopeState(AcceptanceState):
    """What is remembered after a step from a loss that was not seen."""

    before: Slope | None = None
    """At θ, on the step's own mini-batch; None if no step is to be validated."""
    size: NotNegative | None = None
    """Recent average of ‖∇h‖ after steps that were accepted."""


def after_step(
    state: AcceptanceState, pending: Pending, before: Slope | None = None
) -> AcceptanceState:
    """The state with a step to be validated: by slopes, if one is given, else by losses."""
    known = (pending, state.validated, state.confirmed, state.noise)
    if before is None:
        return AcceptanceState(*known)
    return SlopeState(*known, before, state.size if isinstance(state, SlopeState) else None)


def validate_slope(
    rule: Acceptance, damping: AnyDampingRule, state: SlopeState, m: Measurement, after: Slope
) -> Verdict:
    """The verdict on the last step by the gradient after it, on the next mini-batch.

    A step is rejected if ‖∇h‖ is more than `GROWTH` times what it was before and is on average, or if s₁ is
    more than `rule.rejection` times |s₀|, which is all that noise makes it. λ is to follow ρ if its rule
    measures one in this iteration, and whenever h has risen; else `Verdict.measurement` has no `next_rho`.
    """
    last, before = state.pending, state.before
    assert last is not None
    assert before is not None
    scale = last.examples / m.examples if m.summed else 1.0
    slope = scale * after.along
    change = (before.along + slope) / 2
    rho = change / last.predicted_change
    m = replace(
        m,
        predicted_change=last.predicted_change,
        curvature_share=last.curvature_share,
        elapsed=m.iteration - 1 - state.validated,
    )
    done = replace(state, pending=None, before=None)
    validated = replace(done, validated=m.iteration - 1)
    cause = None
    if not math.isfinite(slope + after.size):
        cause = "the gradient is not finite after it."
    elif after.size > GROWTH * max(before.size, state.size or 0.0):
        cause = f"the gradient's norm grew from {before.size:.3g} to {after.size:.3g} with it."
    elif rule.rejection is not None and slope > rule.rejection * abs(before.along):
        cause = (
            f"the slope of the loss along it, {before.along:.3g} before it, is {slope:.3g} after it on the "
            "next mini-batch."
        )
    if cause is not None and rule.rejection is not None:
        return Verdict(validated, replace(m, next_rho=rho, rejected=True), rho, cause)
    if math.isfinite(after.size):
        usual = after.size if state.size is None else state.size
        usual = DECAY * usual + (1 - DECAY) * after.size
        done, validated = replace(done, size=usual), replace(validated, size=usual)
    in_turn = damping.measures(m.iteration) == "next" or damping.measures(m.iteration - 1) == "own"
    if not (in_turn or rho < 0):
        return Verdict(done, m, rho)
    # Without re-scaling M may predict a rise, for which ρ ≈ 1 says nothing good.
    trusted_rho = rho if last.predicted_change < 0 else -math.inf
    return Verdict(validated, replace(m, next_rho=trusted_rho), rho)
