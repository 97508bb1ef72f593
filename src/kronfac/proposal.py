"""One proposal: a direction, made into a step by the exact-Fisher quadratic model [MG15 §6.4, §7].

Nothing here changes anything but its own new tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.factors import KroneckerFactors
from kronfac.inverses import DampedInverse
from kronfac.inverses.block_diagonal import DampedBlockDiagonal
from kronfac.layers import Matrices
from kronfac.minibatch import Batch
from kronfac.point import Network, Point, RefusedError, check_finite
from kronfac.report import Stopwatch
from kronfac.state import State
from kronfac.step_size import (
    Matrix,
    Step,
    StepRule,
    Vector,
    fisher_gram,
    fisher_product,
    quadratic_form,
    refined,
    within,
)


@dataclass(frozen=True)
class Proposal:
    """One candidate γ, carried through to the step that it leads to."""

    gamma: float
    inverse: DampedInverse
    decayed: Matrices | None
    """η F̆⁻¹θ, where the low-rank route keeps it apart."""
    step: Step
    delta: Matrices
    remembered: Matrices | None
    """What momentum goes on with, where that is not δ."""
    loss: float
    """As the closure returned it."""
    penalty: float
    """η/2 ‖θ‖²."""
    loss_seen: bool
    """See `Evaluation.seen`."""
    curvature_share: float
    """δᵀ(F + ηI)δ / δᵀ(F + (λ + η)I)δ: what of the model's curvature is not λ's."""
    far: bool
    """Whether a step that is not bounded is longer than θ, so that θ + δ − δ has lost digits of θ."""
    change: float | None = None
    """h(θ + δ) − h(θ), where the proposal was judged by it."""


def propose(
    network: Network,
    point: Point,
    before: State,
    factors: KroneckerFactors,
    gamma: float,
    inverse: DampedInverse,
    decayed: Matrices | None,
    step_size: StepRule,
    rows: Batch,
    watch: Stopwatch,
) -> Proposal:
    """Δ and the best δ = αΔ + μδ₀ with the exact Fisher on `rows`, S₂.

    Raises:
        RefusedError: something that the step is made of is not finite.
    """
    with watch("direction"):
        if point.rows is not None:
            assert isinstance(inverse, DampedBlockDiagonal)
            product = inverse.mv_low_rank(point.gradient, point.rows, decayed)
        else:
            product = inverse.mv(point.gradient)
        # In place, but for an inverse that gave back the gradient itself.
        directions = [
            tuple(
                U.neg() if U is V else U.neg_()
                for U, V in zip(product, point.gradient, strict=True)
            )
        ]
        if step_size.momentum and before.momentum is not None:
            directions.append(before.momentum)
    with watch("fisher_products"):
        gram = fisher_gram(
            network.model,
            network.layers,
            network.objective.likelihood,
            rows,
            network.case_weight(point.batch),
            directions,
        )
    with watch("step_size"):
        seen = point.batch.seen_loss
        found = _found(network, point, factors, directions, gram, step_size.bounded)
        if found is None:
            check_finite(point, factors, network.layers)
            raise RefusedError("The curvature of the step is not finite.")
        damping = before.lambda_ + point.weight_decay
        Q = _sum(found.fisher, found.inner, damping)
        precision = torch.finfo(point.gradient[0].dtype).eps
        step = step_size.solve(Q, found.slopes, precision, before.experience)
        if not math.isfinite(step.predicted_change):
            raise RefusedError("The predicted change of the objective is not finite.")
        penalty = point.weight_decay / 2 * found.squares
        delta, remembered = _combine(directions, step)
        undamped = _sum(found.fisher, found.inner, point.weight_decay)
        curvature, damped = (quadratic_form(B, step.coefficients) for B in (undamped, Q))
    if step_size.cg_steps > 1:
        with watch("conjugate_gradients"):
            delta, change = _refined(
                network, point, before.lambda_, delta, inverse, step_size.cg_steps, rows
            )
            step, remembered = Step(step.coefficients, step.predicted_change + change), None
    if step_size.bounded:
        # Where mini-batches differ, steps from a loss that is rounding error are long and lead anywhere,
        # which cases that are not among these have to pay for. Where they don't differ, such a step shows
        # at once, and is taken back.
        least = network.resolution(point.batch) if before.confirmed is not None else 0.0
        step, cut = within(step, found.loss + penalty, least)
        if cut < 1:
            # What momentum remembers too: where there is nothing to gain it is forgotten.
            for V in (*delta, *(remembered or ())):
                V.mul_(cut)
    return Proposal(
        gamma=gamma,
        inverse=inverse,
        decayed=decayed,
        step=step,
        delta=delta,
        remembered=remembered,
        loss=found.returned,
        penalty=penalty,
        loss_seen=seen is not None
        and point.seen(found.loss, found.seen_loss, point.gradient[0].dtype),
        curvature_share=curvature / damped if damped > 0 else 1.0,
        far=not step_size.bounded
        and quadratic_form(found.inner, step.coefficients) > found.squares,
    )


def _refined(
    network: Network,
    point: Point,
    lambda_: float,
    delta: Matrices,
    inverse: DampedInverse,
    cg_steps: int,
    rows: Batch,
) -> tuple[Matrices, float]:
    """δ after the further CG steps, all on S₂, and what they add to the predicted change."""

    def product(v: Matrices) -> Matrices:
        Fv = fisher_product(
            network.model,
            network.layers,
            network.objective.likelihood,
            rows,
            network.case_weight(point.batch),
            v,
        )
        damping = lambda_ + point.weight_decay
        return tuple(torch.add(a, b, alpha=damping) for a, b in zip(Fv, v, strict=True))

    return refined(delta, point.gradient, product, inverse.mv, cg_steps - 1)


@dataclass(frozen=True)
class _Found:
    """All that the host has to know of a proposal to make it a step, in float64."""

    fisher: Matrix
    """v_iᵀFv_j."""
    inner: Matrix
    """v_iᵀv_j."""
    slopes: Vector
    """∇hᵀv_j."""
    returned: float
    loss: float
    seen_loss: float
    squares: float
    """‖θ‖², where the objective has it or the step is not bounded."""


def _found(
    network: Network,
    point: Point,
    factors: KroneckerFactors,
    directions: Sequence[Matrices],
    gram: Tensor,
    bounded: bool,
) -> _Found | None:
    """In the step's one synchronisation; None if something is not finite, the factors included."""
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


def _combine(directions: Sequence[Matrices], step: Step) -> tuple[Matrices, Matrices | None]:
    """Σ_j c_j v_j, in the memory of the first direction; the same with less of that, if it is less."""
    total = tuple(V.mul_(step.coefficients[0]) for V in directions[0])
    remembered = None
    if step.remembered < 1:
        remembered = tuple(V * step.remembered for V in total)
    for direction, c in zip(directions[1:], step.coefficients[1:], strict=True):
        for made in (total,) if remembered is None else (total, remembered):
            for V, W in zip(made, direction, strict=True):
                V.add_(W, alpha=c)
    return total, remembered


def _squares(network: Network) -> list[Tensor]:
    """What ‖θ‖² is the sum of."""
    flat = [p.reshape(-1) for layer in network.layers for p in layer.parameters()]
    return [torch.dot(p, p) for p in flat]
