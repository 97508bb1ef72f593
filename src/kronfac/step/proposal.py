"""One proposal: a direction, made into a step by the exact-Fisher quadratic model [MG15 §6.4, §7].

Pure functions, but for their own new tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.control import Measurement, Step, StepRule, StepState
from kronfac.control.base import Coefficients, Matrix, inner, quadratic_form
from kronfac.control.step_rule import clip_to_objective, clip_to_radius, refine
from kronfac.curvature import Curvature, DampedInverse
from kronfac.groups import PerParameter
from kronfac.linalg import OuterProduct, dot, low_rank_pays
from kronfac.linearize import fisher_gram, fisher_product
from kronfac.model import Matrices, Network
from kronfac.record import Batch
from kronfac.report import Stopwatch
from kronfac.step.evaluation import Evaluation, RefusedError

ONE = PerParameter(1.0)


@dataclass(frozen=True)
class Proposal:
    """One candidate γ, carried through to the step that it leads to."""

    gamma: float
    inverse: DampedInverse
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


@dataclass(frozen=True)
class Proposer:
    """Makes a step out of a damped inverse: all that the candidates for γ share."""

    evaluation: Evaluation
    examples: Batch
    """S₂, which the exact Fisher is taken on."""
    fisher_examples: int
    """Examples of S₂ on all ranks."""
    curvature: Curvature
    """The moving averages."""
    rule: StepRule
    state: StepState
    measurement: Measurement
    """With λ, η and c."""
    watch: Stopwatch

    def propose(self, gamma: float, inverse: DampedInverse) -> Proposal:
        """Δ and the best δ = αΔ + μδ₀ by the quadratic model.

        Raises:
            RefusedError: something that the step is made of is not finite.
        """
        evaluation, rule, m = self.evaluation, self.rule, self.measurement
        with self.watch("direction"):
            directions = self._directions(inverse)
        with self.watch("fisher_products"):
            gram = self._fisher_gram(directions)
        with self.watch("step_rule"):
            found = model_numbers(evaluation, self.curvature, directions, gram, rule.bounded)
            if found is None:
                evaluation.check_finite(self.curvature)
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
                    delta, evaluation.gradient, self._product, inverse.mv, rule.cg_steps - 1
                )
                step, momentum = Step(step.coefficients, step.predicted_change + change), delta
                slope = float(dot(evaluation.gradient, delta))
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
            step=step,
            delta=delta,
            slope=slope,
            momentum=momentum,
            loss=found.returned,
            penalty=penalty,
            curvature_share=curvature / damped if damped > 0 else 1.0,
            far=not rule.bounded and quadratic_form(found.inner, step.coefficients) > found.squares,
        )

    @property
    def network(self) -> Network:
        """What is trained."""
        return self.evaluation.network

    @property
    def _factor(self) -> float:
        """What the terms of S₂ count: examples of the whole mini-batch over those of S₂."""
        evaluation = self.evaluation
        return evaluation.examples / self.fisher_examples

    def _fisher_gram(self, directions: Sequence[Matrices]) -> Tensor:
        """v_iᵀ F v_j on S₂."""
        world = self.evaluation.world
        return fisher_gram(self.network, self.examples, directions, self._factor, world)

    def _directions(self, inverse: DampedInverse) -> list[Matrices]:
        """Δ, and δ₀ with momentum."""
        directions = [tuple(U.neg_() for U in inverse.mv(self._gradient()))]
        if self.rule.momentum and self.state.momentum is not None:
            directions.append(self.state.momentum)
        return directions

    def _gradient(self) -> Sequence[Tensor | OuterProduct]:
        """∇h, by its factors where they are known and multiplying these is cheaper [MG15 §8]."""
        evaluation = self.evaluation
        if evaluation.factors is None:
            return evaluation.gradient
        triples = zip(self.network.units, evaluation.gradient, evaluation.factors, strict=True)
        m = evaluation.examples
        return [factors if low_rank_pays(u.shape, m) else V for u, V, factors in triples]

    def _product(self, v: Matrices) -> Matrices:
        """(F + λI + H) v on S₂, H the diagonal matrix of η."""
        m = self.measurement
        world = self.evaluation.world
        Fv = fisher_product(self.network, self.examples, v, self._factor, world)
        decay = self.evaluation.weight_decay
        if not decay.uniform:
            parts = decay.times(self.network.parameters, self.network.split(v))
            Fv = tuple(a + b for a, b in zip(Fv, self.network.join(parts), strict=True))
        damping = m.lambda_ + (decay.usual if decay.uniform else 0.0)
        return tuple(torch.add(a, b, alpha=damping) for a, b in zip(Fv, v, strict=True))

    def model_along(self, delta: Matrices) -> tuple[float, float, float]:
        """∇hᵀδ, M(δ) − M(0) and the curvature share of a step that is none of `propose`'s, for one J v."""
        found = model_numbers(
            self.evaluation, self.curvature, [delta], self._fisher_gram([delta]), self.rule.bounded
        )
        if found is None:
            raise RefusedError("The curvature of the step is not finite.")
        (curvature,), (undamped,) = found.damped(self.measurement.lambda_)[0], found.damped(0.0)[0]
        slope = found.slopes[0]
        return slope, slope + curvature / 2, undamped / curvature if curvature > 0 else 1.0


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


@dataclass(frozen=True)
class ModelNumbers:
    """Numbers that the host needs to make a step of a proposal, in float64."""

    fisher: Matrix
    """v_iᵀFv_j."""
    inner: Matrix
    """v_iᵀv_j."""
    decay: float | Matrix
    """η, or v_iᵀHv_j with the diagonal matrix H of η if parameters differ in it."""
    slopes: Coefficients
    """∇hᵀv_j."""
    returned: float
    loss: float
    squares: float
    """‖θ‖², if the objective has it or the step is not bounded."""
    penalty: float
    """½ Σ_p η_p ‖p‖²."""

    def damped(self, lambda_: float) -> Matrix:
        """v_iᵀ(F + λI + H)v_j."""
        if isinstance(self.decay, float):
            return _sum(self.fisher, self.inner, lambda_ + self.decay)
        return _sum(_sum(self.fisher, self.inner, lambda_), self.decay, 1.0)


def model_numbers(
    evaluation: Evaluation,
    curvature: Curvature,
    directions: Sequence[Matrices],
    gram: Tensor,
    bounded: bool,
) -> ModelNumbers | None:
    """Numbers from the step's one synchronisation; None if some are not finite, the factors included."""
    count = len(directions)
    products = _inner_products(directions, evaluation.gradient)
    eta, network = evaluation.weight_decay, evaluation.network
    squares = [] if bounded and not eta else _squares(network)
    apart = [] if eta.uniform else _decay_products(network, directions, eta)
    probes = [number for block in curvature.blocks for number in block.probe()]
    losses = [evaluation.returned_loss, evaluation.loss]
    # What is to be added up is added up by the host: on a device every sum is a launch.
    scalars = torch.stack([*products, *squares, *probes, *apart, *losses]).double()
    numbers = torch.cat([gram.reshape(-1), scalars]).tolist()
    if not all(map(math.isfinite, numbers)):
        return None
    fisher, rest = numbers[: count**2], numbers[count**2 :]
    pairs = len(products) // len(evaluation.gradient)
    total = [sum(rest[i : len(products) : pairs]) for i in range(pairs)]
    lower = [total[i * (i + 1) // 2 :][: i + 1] for i in range(count)]
    returned, loss = rest[-2:]
    norms = rest[len(products) :][: len(squares)]
    decay: float | Matrix = eta.usual
    penalty = eta.usual / 2 * sum(norms)
    if not eta.uniform:
        sums = rest[len(rest) - 2 - len(apart) : -2]
        decay = [sums[i * count :][:count] for i in range(count)]
        penalty = sum(eta[p] / 2 * n for p, n in zip(network.parameters, norms, strict=True))
    return ModelNumbers(
        fisher=[fisher[i * count :][:count] for i in range(count)],
        inner=[[lower[max(i, j)][min(i, j)] for j in range(count)] for i in range(count)],
        decay=decay,
        slopes=total[-count:],
        returned=returned,
        loss=loss,
        squares=sum(norms),
        penalty=penalty,
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


def _decay_products(
    network: Network, directions: Sequence[Matrices], eta: PerParameter
) -> list[Tensor]:
    """v_iᵀHv_j, row by row; each part by its parameter."""
    parts = [[t.reshape(-1) for t in network.split(v)] for v in directions]
    etas = [eta[p] for p in network.parameters]

    def product(u: Sequence[Tensor], v: Sequence[Tensor]) -> Tensor:
        terms = [torch.dot(a, b) * e for a, b, e in zip(u, v, etas, strict=True) if e]
        return torch.stack(terms).sum()

    return [product(u, v) for u in parts for v in parts]


def _sum(A: Matrix, B: Matrix, weight: float) -> Matrix:
    """A + weight · B."""
    return [[a + weight * b for a, b in zip(*rows, strict=True)] for rows in zip(A, B, strict=True)]


def _squares(network: Network) -> list[Tensor]:
    """Terms of ‖θ‖²."""
    flat = [p.reshape(-1) for p in network.parameters]
    return [torch.dot(p, p) for p in flat]


def apply_rates(proposer: Proposer, proposal: Proposal, rates: PerParameter) -> Proposal:
    """The proposal times the learning rate of each parameter's group; with 0 for all, no step at all.

    α and μ are solved for lr = 1. With L the diagonal matrix of learning rates the applied step is L δ, and

        M(Lδ) − M(0) = ∇hᵀLδ + ½ (Lδ)ᵀ(F + λI + H)Lδ,   H the diagonal matrix of η.

    One lr for all parameters needs no further product: l ∇hᵀδ + ½ l² δᵀ(F + λI + H)δ.

    The momentum buffer is Lδ over the largest learning rate. The common factor makes no difference where μ
    is solved for; where the buffer is a memory of many steps, these count as what they are at lr = 1, or a
    schedule would make the memory shorter.
    """
    applied = _times_rates(proposer, proposal, rates)
    lost = proposer.evaluation.lost_to_clipping(applied.delta, applied.slope)
    if not lost:
        return applied
    step = applied.step
    step = replace(step, predicted_change=step.predicted_change + lost)
    return replace(applied, step=step, slope=applied.slope + lost)


def _times_rates(proposer: Proposer, proposal: Proposal, rates: PerParameter) -> Proposal:
    largest, step = rates.largest, proposal.step
    if rates.uniform and largest == 1:
        return proposal
    if largest == 0:
        nothing = tuple(torch.zeros_like(V) for V in proposal.delta)
        momentum = nothing if proposer.state.momentum is None else proposer.state.momentum
        still = replace(step, predicted_change=0.0, slope=0.0)
        return replace(proposal, step=still, delta=nothing, momentum=momentum, slope=0.0)
    shared = proposal.momentum is proposal.delta
    network = proposer.network
    if rates.uniform:
        delta = tuple(V * largest for V in proposal.delta)
        slope = largest * proposal.slope
        bend = largest**2 * (step.predicted_change - proposal.slope)
        return replace(
            proposal,
            step=replace(step, predicted_change=slope + bend, slope=slope),
            delta=delta,
            slope=slope,
        )
    delta = _times(network, rates, proposal.delta)
    relative = PerParameter(
        rates.usual / largest, {p: rate / largest for p, rate in rates.others.items()}
    )
    momentum = _times(network, relative, proposal.delta if shared else proposal.momentum)
    slope, change, share = proposer.model_along(delta)
    return replace(
        proposal,
        step=Step(step.coefficients, change, slope, step.remembered),
        delta=delta,
        momentum=momentum,
        slope=slope,
        curvature_share=share,
    )


def _times(network: Network, rates: PerParameter, vector: Matrices) -> Matrices:
    return network.join(rates.times(network.parameters, network.split(vector)))
