"""One proposal: a direction, made into a step by the exact-Fisher quadratic model [MG15 §6.4, §7].

Pure functions, but for their own new tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from kronfac.closure import Rows
from kronfac.control import (
    Coefficients,
    Matrix,
    Measurement,
    Step,
    StepRule,
    StepState,
    clip_to_objective,
    quadratic_form,
    refine,
)
from kronfac.factors import KroneckerFactors
from kronfac.fisher_products import fisher_gram, fisher_product
from kronfac.inverses import DampedInverse
from kronfac.layers import Matrices
from kronfac.minibatch import Batch
from kronfac.point import Network, Point, RefusedError, check_finite
from kronfac.report import Stopwatch


@dataclass(frozen=True)
class Proposal:
    """One candidate γ, carried through to the step that it leads to."""

    gamma: float
    inverse: DampedInverse
    decayed: Matrices | None
    """η F̆⁻¹θ, if the low-rank route keeps it apart."""
    step: Step
    delta: Matrices
    momentum: Matrices
    """The momentum buffer after it, δ itself or less."""
    loss: float
    """As the closure returned it."""
    penalty: float
    """η/2 ‖θ‖²."""
    loss_seen: bool
    """See `Evaluation.seen`."""
    curvature_share: float
    """δᵀ(F + ηI)δ / δᵀ(F + (λ + η)I)δ: what of the model's curvature is not λ's."""
    far: bool
    """Whether a step that is not bounded is longer than θ, so that θ + δ − δ has lost digits of θ and θ has
    to be kept for a rollback."""
    change: float | None = None
    """h(θ + δ) − h(θ), if it was computed."""


class _LowRankInverse(Protocol):
    def mv_low_rank(
        self, vectors: Matrices, outer: Sequence[Rows], decayed: Matrices | None
    ) -> Matrices: ...


@dataclass(frozen=True)
class Proposer:
    """Makes a step out of a damped inverse: all that the candidates for γ share."""

    network: Network
    point: Point
    examples: Batch
    """S₂, which the exact Fisher is taken on."""
    factors: KroneckerFactors
    """Checked for being finite."""
    rule: StepRule
    state: StepState
    measurement: Measurement
    """With λ, η and c."""
    watch: Stopwatch

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
            gram = fisher_gram(
                self.network.model,
                self.network.layers,
                self.network.objective.likelihood,
                self.examples,
                m.objective_scale,
                directions,
            )
        with self.watch("step_size"):
            found = _found(self.network, point, self.factors, directions, gram, rule.bounded)
            if found is None:
                check_finite(point, self.factors, self.network.layers)
                raise RefusedError("The curvature of the step is not finite.")
            Q = _sum(found.fisher, found.inner, m.lambda_ + m.weight_decay)
            step = rule.solve(Q, found.slopes, self.state, m)
            if not math.isfinite(step.predicted_change):
                raise RefusedError("The predicted change of the objective is not finite.")
            penalty = m.weight_decay / 2 * found.squares
            delta, momentum = _combine(directions, step)
            undamped = _sum(found.fisher, found.inner, m.weight_decay)
            curvature, damped = (quadratic_form(B, step.coefficients) for B in (undamped, Q))
        if rule.cg_steps > 1:
            with self.watch("conjugate_gradients"):
                delta, change = refine(
                    delta, point.gradient, self._product, inverse.mv, rule.cg_steps - 1
                )
                step, momentum = Step(step.coefficients, step.predicted_change + change), delta
        if rule.bounded:
            # If mini-batches differ, steps from a loss that is rounding error are long and lead anywhere,
            # which examples that are not among these have to pay for. If they don't differ, such a step
            # shows at once, and is rejected.
            least = m.resolution if m.confirmed is not None else 0.0
            step, cut = clip_to_objective(step, found.loss + penalty, least)
            if cut < 1:
                # The momentum buffer too: where there is nothing to gain it is forgotten.
                for V in delta if momentum is delta else (*delta, *momentum):
                    V.mul_(cut)
        return Proposal(
            gamma=gamma,
            inverse=inverse,
            decayed=decayed,
            step=step,
            delta=delta,
            momentum=momentum,
            loss=found.returned,
            penalty=penalty,
            loss_seen=point.batch.seen_loss is not None
            and point.seen(found.loss, found.seen_loss, point.gradient[0].dtype),
            curvature_share=curvature / damped if damped > 0 else 1.0,
            far=not rule.bounded and quadratic_form(found.inner, step.coefficients) > found.squares,
        )

    def for_trials(self) -> "Proposer":
        """The same for steps that are not taken: they leave no time on the clock, nor a stale ηF̆⁻¹θ."""
        return replace(self, point=replace(self.point, rows=None), watch=Stopwatch())

    def _directions(self, inverse: DampedInverse, decayed: Matrices | None) -> list[Matrices]:
        """Δ, and δ₀ with momentum."""
        gradient, rows = self.point.gradient, self.point.rows
        if rows is None:
            product = inverse.mv(gradient)
        else:
            product = cast(_LowRankInverse, inverse).mv_low_rank(gradient, rows, decayed)
        # In place, but for an inverse that gave back the gradient itself.
        directions = [
            tuple(U.neg() if U is V else U.neg_() for U, V in zip(product, gradient, strict=True))
        ]
        if self.rule.momentum and self.state.momentum is not None:
            directions.append(self.state.momentum)
        return directions

    def _product(self, v: Matrices) -> Matrices:
        """(F + (λ + η)I) v on S₂."""
        m = self.measurement
        Fv = fisher_product(
            self.network.model,
            self.network.layers,
            self.network.objective.likelihood,
            self.examples,
            m.objective_scale,
            v,
        )
        damping = m.lambda_ + m.weight_decay
        return tuple(torch.add(a, b, alpha=damping) for a, b in zip(Fv, v, strict=True))


@dataclass(frozen=True)
class _Found:
    """Numbers that the host needs to make a step of a proposal, in float64."""

    fisher: Matrix
    """v_iᵀFv_j."""
    inner: Matrix
    """v_iᵀv_j."""
    slopes: Coefficients
    """∇hᵀv_j."""
    returned: float
    loss: float
    seen_loss: float
    squares: float
    """‖θ‖², if the objective has it or the step is not bounded."""


def _found(
    network: Network,
    point: Point,
    factors: KroneckerFactors,
    directions: Sequence[Matrices],
    gram: Tensor,
    bounded: bool,
) -> _Found | None:
    """Numbers from the step's one synchronisation; None if some are not finite, the factors included."""
    count, seen = len(directions), point.batch.seen_loss
    products = _inner_products(directions, point.gradient)
    squares = [] if bounded and point.weight_decay == 0 else _squares(network)
    # If all are finite, so are the factors' diagonals.
    traces = [M.trace() for M in (*factors.A, *factors.G)]
    losses = [point.returned, point.loss, point.loss if seen is None else seen]
    # What is to be added up is added up by the host: on a device every sum is a launch.
    scalars = torch.stack([*products, *squares, *traces, *losses]).double()
    numbers = torch.cat([gram.reshape(-1), scalars]).tolist()
    if not all(map(math.isfinite, numbers)):
        return None
    fisher, rest = numbers[: count**2], numbers[count**2 :]
    pairs = len(products) // len(point.gradient)
    total = [sum(rest[i : len(products) : pairs]) for i in range(pairs)]
    lower = [total[i * (i + 1) // 2 :][: i + 1] for i in range(count)]
    returned, loss, seen_loss = rest[-3:]
    return _Found(
        fisher=[fisher[i * count :][:count] for i in range(count)],
        inner=[[lower[max(i, j)][min(i, j)] for j in range(count)] for i in range(count)],
        slopes=total[-count:],
        returned=returned,
        loss=loss,
        seen_loss=seen_loss,
        squares=sum(rest[len(products) :][: len(squares)]),
    )


def _inner_products(directions: Sequence[Matrices], gradient: Matrices) -> list[Tensor]:
    """v_iᵀv_j for j ≤ i, then ∇hᵀv_j, of one layer after the other.

    All products of a layer in turn: they are bound by memory, and a layer's matrices stay in the cache.
    """
    products = []
    for matrices in zip(*directions, gradient, strict=True):
        *v, g = (M.reshape(-1) for M in matrices)
        products += [torch.dot(v[i], v[j]) for i in range(len(v)) for j in range(i + 1)]
        products += [torch.dot(g, v_j) for v_j in v]
    return products


def _sum(A: Matrix, B: Matrix, weight: float) -> Matrix:
    """A + weight · B."""
    return [[a + weight * b for a, b in zip(*rows, strict=True)] for rows in zip(A, B, strict=True)]


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


def _squares(network: Network) -> list[Tensor]:
    """Terms of ‖θ‖²."""
    flat = [p.reshape(-1) for layer in network.layers for p in layer.parameters()]
    return [torch.dot(p, p) for p in flat]
