"""One proposal: a direction, made into a step by the exact-Fisher quadratic model [MG15 §6.4, §7].

Pure functions, but for their own new tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.control import (
    Coefficients,
    Matrix,
    Measurement,
    Step,
    StepRule,
    StepState,
    clip_to_objective,
    clip_to_radius,
    quadratic_form,
    refine,
)
from kronfac.curvature import Curvature, DampedInverse
from kronfac.evaluation import Point, RefusedError
from kronfac.fisher_products import fisher_gram, fisher_product
from kronfac.linalg import OuterProduct, low_rank_pays
from kronfac.network import Batch, Matrices, Network
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


@dataclass(frozen=True)
class Proposer:
    """Makes a step out of a damped inverse: all that the candidates for γ share."""

    point: Point
    examples: Batch
    """S₂, which the exact Fisher is taken on."""
    curvature: Curvature
    """Checked for being finite."""
    rule: StepRule
    state: StepState
    measurement: Measurement
    """With λ, η and c."""
    watch: Stopwatch
    clip: float | None = None
    """The radius of a trust region in the Fisher norm."""

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
            gram = fisher_gram(self.network, self.examples, directions, self._factor)
        with self.watch("step_size"):
            found = _found(point, self.curvature, directions, gram, rule.bounded)
            if found is None:
                point.check_finite(self.curvature)
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
            # The momentum buffer too: once there is nothing to gain it is forgotten.
            _shorten(delta, momentum, cut)
        if self.clip is not None:
            fisher = quadratic_form(found.fisher, step.coefficients)
            if rule.cg_steps > 1:  # not along the two directions
                fisher = float(fisher_gram(self.network, self.examples, [delta], self._factor))
            step, cut = clip_to_radius(step, fisher, self.clip)
            _shorten(delta, momentum, cut)
        return Proposal(
            gamma=gamma,
            inverse=inverse,
            decayed=decayed,
            step=step,
            delta=delta,
            momentum=momentum,
            loss=found.returned,
            penalty=penalty,
            loss_seen=point.evaluation.batch.seen_loss is not None
            and point.evaluation.agrees(found.loss, found.seen_loss),
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
        return self.point.evaluation.batch.examples / self.examples.examples

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
                product[n] = gradient[n] - decay * unit.join(unit.parameters)
        return product

    def _low_rank(self) -> list[bool]:
        """The units for which the gradient's factors are cheaper to multiply, if they are there."""
        examples = self.point.evaluation.batch.examples
        return [low_rank_pays(unit.shape, examples) for unit in self.network.units]

    def _product(self, v: Matrices) -> Matrices:
        """(F + (λ + η)I) v on S₂."""
        m = self.measurement
        Fv = fisher_product(self.network, self.examples, v, self._factor)
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
    point: Point,
    curvature: Curvature,
    directions: Sequence[Matrices],
    gram: Tensor,
    bounded: bool,
) -> _Found | None:
    """Numbers from the step's one synchronisation; None if some are not finite, the factors included."""
    evaluation = point.evaluation
    count, seen = len(directions), evaluation.batch.seen_loss
    products = _inner_products(directions, point.gradient)
    squares = [] if bounded and evaluation.weight_decay == 0 else _squares(evaluation.network)
    probes = [number for block in curvature.blocks for number in block.probe()]
    loss = evaluation.loss
    losses = [evaluation.returned_loss, loss, loss if seen is None else seen]
    # What is to be added up is added up by the host: on a device every sum is a launch.
    scalars = torch.stack([*products, *squares, *probes, *losses]).double()
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


def _shorten(delta: Matrices, momentum: Matrices, share: float) -> None:
    """Multiply a step and the momentum buffer, which may be the same, by a share, in place."""
    if share < 1:
        for V in delta if momentum is delta else (*delta, *momentum):
            V.mul_(share)


def _squares(network: Network) -> list[Tensor]:
    """Terms of ‖θ‖²."""
    flat = [p.reshape(-1) for p in network.parameters]
    return [torch.dot(p, p) for p in flat]
