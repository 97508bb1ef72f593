"""One proposal: a direction, made into a step by the exact-Fisher quadratic model [MG15 §6.4, §7].

Pure functions, but for their own new tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.control import (
    Measurement,
    Step,
    StepRule,
    StepState,
    clip_to_objective,
    clip_to_radius,
    quadratic_form,
    refine,
)
from kronfac.control.base import inner
from kronfac.curvature import Curvature, DampedInverse
from kronfac.linalg import OuterProduct, dot, low_rank_pays
from kronfac.linearize import Linearizer
from kronfac.model import Matrices, Network
from kronfac.record import Batch
from kronfac.report import Stopwatch
from kronfac.step.evaluation import Point, RefusedError
from kronfac.step.fisher_products import fisher_gram, fisher_product
from kronfac.step.model_numbers import Along, model_numbers


@dataclass(frozen=True)
class Proposal:
    """One candidate γ, carried through to the step that it leads to."""

    gamma: float
    inverse: DampedInverse
    decayed: Matrices | None
    """η F̆⁻¹θ, if the low-rank route keeps it apart."""
    step: Step
    delta: Matrices
    slope: float
    """∇hᵀδ."""
    momentum: Matrices
    """The momentum buffer after it, δ itself or less."""
    loss: float
    """As the closure returned it."""
    penalty: float
    """½ Σ_p η_p ‖p‖²."""
    curvature_share: float
    """δᵀ(F + ηI)δ / δᵀ(F + (λ + η)I)δ: what of the model's curvature is not λ's."""
    far: bool
    """Whether a step that is not bounded is longer than θ, so that θ + δ − δ has lost digits of θ and θ has
    to be kept for a rollback."""
    change: float | None = None
    """h(θ + δ) − h(θ), if it was computed."""


@dataclass(frozen=True)
class Proposer:
    """Makes a step out of a damped inverse: all that the candidates for γ share."""

    point: Point
    examples: Batch
    """S₂, which the exact Fisher is taken on."""
    curvature: Curvature
    """The moving averages."""
    rule: StepRule
    state: StepState
    measurement: Measurement
    """With λ, η and c."""
    watch: Stopwatch
    around: Linearizer | None = None
    """What the statistics have kept of J, if they are of the same examples."""
    fisher_examples: int | None = None
    """Examples of S₂ on all ranks; None if this one has all of them."""

    def propose(
        self, gamma: float, inverse: DampedInverse, decayed: Matrices | None = None
    ) -> Proposal:
        """Δ and the best δ = αΔ + μδ₀ by the quadratic model.

        Raises:
            RefusedError: something that the step is made of is not finite.
        """
        point, rule, m = self.point, self.rule, self.measurement
        with self.watch("direction"):
            directions = self._directions(inverse, decayed)
        with self.watch("fisher_products"):
            gram = self._fisher_gram(directions)
        with self.watch("step_rule"):
            found = model_numbers(point, self.curvature, directions, gram, rule.bounded)
            if found is None:
                point.check_finite(self.curvature)
                raise RefusedError("The curvature of the step is not finite.")
            Q = found.damped(m.lambda_)
            step = rule.solve(Q, found.slopes, self.state, m)
            if not math.isfinite(step.predicted_change):
                raise RefusedError("The predicted change of the objective is not finite.")
            penalty, slope = found.penalty, inner(found.slopes, step.coefficients)
            delta, momentum = _combine(directions, step)
            curvature, damped = (
                quadratic_form(B, step.coefficients) for B in (found.damped(0.0), Q)
            )
        if rule.cg_steps > 1:
            with self.watch("conjugate_gradients"):
                delta, change = refine(
                    delta, point.gradient, self._product, inverse.mv, rule.cg_steps - 1
                )
                step, momentum = Step(step.coefficients, step.predicted_change + change), delta
                slope = float(dot(point.gradient, delta))
        if rule.bounded:
            # If mini-batches differ, steps from a loss that is rounding error are long and lead anywhere,
            # which examples that are not among these have to pay for. If they don't differ, such a step
            # shows at once, and is rejected.
            least = m.resolution if m.confirmed is not None else 0.0
            step, cut = clip_to_objective(step, found.loss + penalty, least)
            slope *= cut
            # The momentum buffer too: once there is nothing to gain it is forgotten.
            _shorten(delta, momentum, cut)
        if rule.radius is not None:
            fisher = quadratic_form(found.fisher, step.coefficients)
            if rule.cg_steps > 1:  # not along the two directions
                fisher = float(self._fisher_gram([delta]))
            step, cut = clip_to_radius(step, fisher, rule.radius)
            slope *= cut
            _shorten(delta, momentum, cut)
        return Proposal(
            gamma=gamma,
            inverse=inverse,
            decayed=decayed,
            step=step,
            delta=delta,
            slope=slope,
            momentum=momentum,
            loss=found.returned,
            penalty=penalty,
            curvature_share=curvature / damped if damped > 0 else 1.0,
            far=not rule.bounded and quadratic_form(found.inner, step.coefficients) > found.squares,
        )

    def for_trials(self) -> "Proposer":
        """The same for steps that are not taken: they leave no time on the clock, nor a stale ηF̆⁻¹θ."""
        evaluation = replace(self.point.evaluation, factors=None)
        return replace(self, point=replace(self.point, evaluation=evaluation), watch=Stopwatch())

    @property
    def network(self) -> Network:
        """What is trained."""
        return self.point.evaluation.network

    @property
    def _factor(self) -> float:
        """What the terms of S₂ count: examples of the whole mini-batch over those of S₂."""
        evaluation = self.point.evaluation
        return evaluation.examples / (self.fisher_examples or self.examples.examples)

    def _fisher_gram(self, directions: Sequence[Matrices]) -> Tensor:
        """v_iᵀ F v_j on S₂."""
        return fisher_gram(
            self.network,
            self.examples,
            directions,
            self._factor,
            self.around,
            self.point.evaluation.world,
        )

    def _directions(self, inverse: DampedInverse, decayed: Matrices | None) -> list[Matrices]:
        """Δ, and δ₀ with momentum."""
        gradient = self._gradient(decayed)
        product = inverse.mv(gradient)
        if decayed is not None:
            product = tuple(
                U + decay if low_rank else U
                for U, decay, low_rank in zip(product, decayed, self._low_rank(), strict=True)
            )
        directions = [tuple(U.neg_() for U in product)]
        if self.rule.momentum and self.state.momentum is not None:
            directions.append(self.state.momentum)
        return directions

    def _gradient(self, decayed: Matrices | None) -> Sequence[Tensor | OuterProduct]:
        """∇h as the inverse is to multiply it: by its factors, if they are there and that is cheaper.

        With `decayed`, which is the weight decay's part of the product, without that part, in the units for
        which factors are cheaper.
        """
        evaluation = self.point.evaluation
        gradient, factors, decay = self.point.gradient, evaluation.factors, evaluation.weight_decay
        if decay and decayed is None:
            return gradient
        product: list[Tensor | OuterProduct] = list(gradient)
        for n, low_rank in enumerate(self._low_rank()):
            if low_rank and factors is not None:
                product[n] = factors[n]
            elif low_rank and decay:
                unit = self.network.units[n]
                product[n] = gradient[n] - unit.join(decay.times(unit.parameters, unit.parameters))
        return product

    def _low_rank(self) -> list[bool]:
        """The units for which the gradient's factors are cheaper to multiply, if they are there."""
        examples = self.point.evaluation.examples
        return [low_rank_pays(unit.shape, examples) for unit in self.network.units]

    def _product(self, v: Matrices) -> Matrices:
        """(F + λI + H) v on S₂, H the diagonal matrix of η."""
        m = self.measurement
        Fv = fisher_product(
            self.network,
            self.examples,
            v,
            self._factor,
            self.around,
            self.point.evaluation.world,
        )
        decay = self.point.evaluation.weight_decay
        if not decay.uniform:
            parts = decay.times(self.network.parameters, self.network.split(v))
            Fv = tuple(a + b for a, b in zip(Fv, self.network.join(parts), strict=True))
        damping = m.lambda_ + (decay.usual if decay.uniform else 0.0)
        return tuple(torch.add(a, b, alpha=damping) for a, b in zip(Fv, v, strict=True))

    def model_along(self, delta: Matrices) -> Along:
        """M along a step that is none of `propose`'s, for one more J v."""
        gram = self._fisher_gram([delta])
        found = model_numbers(self.point, self.curvature, [delta], gram, self.rule.bounded)
        if found is None:
            raise RefusedError("The curvature of the step is not finite.")
        (curvature,), (undamped,) = found.damped(self.measurement.lambda_)[0], found.damped(0.0)[0]
        share = undamped / curvature if curvature > 0 else 1.0
        return Along(found.slopes[0], curvature, share)


def _combine(directions: Sequence[Matrices], step: Step) -> tuple[Matrices, Matrices]:
    """δ = Σ_j c_j v_j, in the memory of the first direction, and the momentum buffer, δ or less of it."""
    total = tuple(V.mul_(step.coefficients[0]) for V in directions[0])
    momentum = total
    if step.remembered < 1:
        momentum = tuple(V * step.remembered for V in total)
    for direction, c in zip(directions[1:], step.coefficients[1:], strict=True):
        for made in (total,) if momentum is total else (total, momentum):
            for V, W in zip(made, direction, strict=True):
                V.add_(W, alpha=c)
    return total, momentum


def _shorten(delta: Matrices, momentum: Matrices, share: float) -> None:
    """Multiply a step and the momentum buffer, which may be the same, by a share, in place."""
    if share < 1:
        for V in delta if momentum is delta else (*delta, *momentum):
            V.mul_(share)
