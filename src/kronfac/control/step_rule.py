"""Rules for the step (α, μ) along a few directions [MG15 §6.4, §7].

    M(δ) − M(0) = ½ δᵀ(F + (λ + η)I)δ + ∇hᵀδ,   δ = Σ_j c_j v_j

For directions v_j that is ½ cᵀQc + rᵀc with Q_ij = v_iᵀ(F + (λ + η)I)v_j and r_j = ∇hᵀv_j: the
directions are Δ alone (c = α), or Δ and the previous update δ₀ (c = α, μ). These few numbers are Python's,
float64 for tensors of any dtype: a tensor takes longer to make than the sums with it.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from kronfac.control.base import (
    Coefficients,
    Matrix,
    Measurement,
    ParameterVector,
    Rule,
    inner,
    model_change,
    require,
)
from kronfac.control.long_memory import LongMemory, MemoryState
from kronfac.linalg import dot
from kronfac.storage import Storable


@dataclass(frozen=True)
class Step:
    """Coefficients of the directions and what the model says of the step."""

    coefficients: tuple[float, ...]
    predicted_change: float
    """M(δ) − M(0)."""
    slope: float | None = None
    """∇hᵀδ; None along the directions of a minimiser, where it is twice the change."""
    remembered: float = 1.0
    """Share of the part along Δ that enters the momentum buffer."""

    @property
    def slope_and_curvature(self) -> tuple[float, float]:
        """∇hᵀδ and δᵀ(F + (λ + η)I)δ."""
        slope = 2 * self.predicted_change if self.slope is None else self.slope
        return slope, 2 * (self.predicted_change - slope)

    def scaled(self, share: float) -> "Step":
        """c δ, along which M changes by c g + c² q/2, with g = ∇hᵀδ and q the curvature along δ."""
        slope, curvature = self.slope_and_curvature
        return replace(
            self,
            coefficients=tuple(share * c for c in self.coefficients),
            predicted_change=share * slope + share**2 * curvature / 2,
            slope=share * slope,
        )


@dataclass(frozen=True)
class StepState(Storable):
    """The momentum buffer, and a memory of the rule's own."""

    momentum: ParameterVector | None = None
    """δ₀; None before the first step."""
    memory: MemoryState = field(default_factory=MemoryState)


class StepRule(Rule[StepState]):
    """How the coefficients of the directions are chosen [MG15 §6.4, §7]."""

    momentum: bool = False
    """Whether the momentum buffer is one of the directions."""
    bounded: bool = False
    """Whether a step that promises more than the whole objective is cut, see `clip_to_objective`."""
    cg_steps: int = 1
    """Steps of conjugate gradients on M, this one included."""
    radius: float | None = None
    """Trust region: a longer step is shortened to δᵀFδ = radius². None for no bound."""

    @property
    def long_memory(self) -> LongMemory | None:
        """What momentum remembers while mini-batches are noisy; None for the last step as ever."""
        return None

    def init(self, m: Measurement) -> StepState:
        """No momentum yet."""
        return StepState()

    @abstractmethod
    def solve(self, Q: Matrix, r: Coefficients, state: StepState, m: Measurement) -> Step:
        """The step, from Q (k, k) and r (k,), for one direction or two."""


@dataclass(frozen=True)
class RawStep(StepRule):
    """δ = αΔ with a fixed α: no re-scaling, no momentum, as methods before K-FAC did.

    M(δ) is computed all the same, for ρ and for the choice of γ.

    Args:
        alpha: the factor.
        radius: trust region: a longer step is shortened to δᵀFδ = radius². None for no bound.
    """

    alpha: float = 1.0
    radius: float | None = None

    def __post_init__(self) -> None:
        _check_radius(self)

    def solve(self, Q: Matrix, r: Coefficients, state: StepState, m: Measurement) -> Step:
        return Step((self.alpha,), model_change(Q, r, (self.alpha,)))


def _check_radius(rule: StepRule) -> None:
    holds = rule.radius is None or 0 < rule.radius < math.inf
    require(f"{type(rule).__name__}'s radius is positive and finite, or None", rule.radius, holds)


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
    """
    if least > 0 and 0 <= objective <= least:
        nothing = (0.0,) * len(step.coefficients)  # also of coefficients that are not finite
        return replace(step, coefficients=nothing, predicted_change=0.0, slope=0.0), 0.0
    if not 0 < objective - least < -step.predicted_change:
        return step, 1.0
    objective -= least
    slope, curvature = step.slope_and_curvature
    # The smaller root of c g + c² q/2 = −objective, in the form that loses no digits.
    scale = abs(slope) or 1.0  # or squares may overflow
    g, q, h = slope / scale, curvature / scale, objective / scale
    share = 2 * h / (-g + math.sqrt(max(g * g - 2 * q * h, 0.0)))
    return replace(step.scaled(share), predicted_change=-objective), share


def clip_to_radius(step: Step, curvature: float, radius: float) -> tuple[Step, float]:
    """The part of the step within a trust region, δᵀFδ ≤ radius², and its share; `curvature` is δᵀFδ."""
    if not curvature > radius**2:
        return step, 1.0
    share = radius / math.sqrt(curvature)
    return step.scaled(share), share


@dataclass(frozen=True)
class QuadraticModel(StepRule):
    """(α, μ) = argmin M: δ = αΔ + μδ₀, or δ = αΔ without momentum.

    Directions that are linearly dependent to rounding (δ₀ ≈ Δ, δ₀ = 0) make Q singular; its
    pseudo-inverse, taken after scaling every direction to unit curvature, then gives the smallest of
    the minimisers.

    Args:
        momentum: whether the last update δ₀ is one of the directions.
        bounded: whether a step along which M would become negative ends at M = 0. The paper's does not.
        memory: how the step differs while the next mini-batches confirm less than half of what M predicts
            (`long_memory.py`); None for the paper's, the minimiser at all times.
        radius: trust region: a longer step is shortened to δᵀFδ = radius². None for no bound.
    """

    momentum: bool = True
    bounded: bool = True
    memory: LongMemory | None = field(default_factory=LongMemory)
    radius: float | None = None

    def __post_init__(self) -> None:
        _check_radius(self)

    @property
    def long_memory(self) -> LongMemory | None:
        """None for conjugate gradients, which go on from a minimiser of M."""
        return self.memory if self.momentum and self.cg_steps == 1 else None

    def solve(self, Q: Matrix, r: Coefficients, state: StepState, m: Measurement) -> Step:
        coefficients = minimiser(Q, r, m.precision)
        memory = self.long_memory
        if memory is None or m.trusted:
            return Step(coefficients, model_change(Q, r, coefficients))
        blend, kept = memory.blend(Q, r, coefficients, state.memory, m)
        return Step(blend, model_change(Q, r, blend), inner(r, blend), kept)


@dataclass(frozen=True)
class ConjugateGradients(QuadraticModel):
    """`QuadraticModel`, then `cg_steps` − 1 further steps of preconditioned conjugate gradients.

    K-FAC's re-scaled update is the first iterate of conjugate gradients on M(δ), preconditioned by the
    approximate Fisher. Going on from there is Hessian-free optimisation [MG15 §6.4]: δ comes closer to the
    minimiser of M, for a product with the exact Fisher in every further step.

    With `momentum=False` the result is the cg_steps-th iterate from δ = 0. By default the iterates are not
    bounded, and there is no long memory.
    """

    bounded: bool = False
    memory: LongMemory | None = None
    cg_steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cg_steps < 1:
            raise ValueError(f"ConjugateGradients needs at least one step; got {self.cg_steps}.")


def refine(
    delta: ParameterVector,
    gradient: ParameterVector,
    product: Callable[[ParameterVector], ParameterVector],
    precondition: Callable[[ParameterVector], ParameterVector],
    steps: int,
) -> tuple[ParameterVector, float]:
    """δ after further steps towards the minimiser of ½ δᵀBδ + ∇hᵀδ, and by how much that fell.

    Each step minimises over the preconditioned residual z and the last change p of δ, which is what
    conjugate gradients do; p starts as δ itself, the change from 0.

    Args:
        delta: where to start, a minimiser along its own direction.
        gradient: ∇h.
        product: v ↦ B v with B = F + (λ + η) I.
        precondition: r ↦ F⁰⁻¹ r.
        steps: how many.
    """
    total = 0.0
    p, Bp = delta, product(delta)
    residual = tuple(map(torch.add, gradient, Bp))
    for _ in range(steps):
        z = tuple(U.neg() for U in precondition(residual))
        Bz = product(z)
        products = [dot(z, Bz), dot(z, Bp), dot(p, Bp), dot(z, residual), dot(p, residual)]
        zBz, zBp, pBp, *r = torch.stack(products).tolist()
        Q = [[zBz, zBp], [zBp, pBp]]
        a, b = minimiser(Q, r, torch.finfo(z[0].dtype).eps)
        change = model_change(Q, r, (a, b))
        # At the minimiser, or as near to it as rounding lets one get.
        if not change < 0:
            break
        total += change
        p, Bp = (
            tuple(U * a + V * b for U, V in zip(new, old, strict=True))
            for new, old in ((z, p), (Bz, Bp))
        )
        delta = tuple(map(torch.add, delta, p))
        residual = tuple(map(torch.add, residual, Bp))
    return delta, total
