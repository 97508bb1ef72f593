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
from kronfac.step_size import Step, StepRule, fisher_gram, fisher_product, refined, within


@dataclass(frozen=True)
class Proposal:
    """One candidate γ, carried through to the step that it leads to."""

    gamma: float
    inverse: DampedInverse
    decayed: Matrices | None
    """η F̆⁻¹θ, where the low-rank route keeps it apart."""
    step: Step
    delta: Matrices
    loss: float
    """As the closure returned it."""
    penalty: float
    """η/2 ‖θ‖², where the step is bounded."""
    loss_seen: bool
    """See `Evaluation.seen`."""
    curvature_share: float
    """δᵀ(F + ηI)δ / δᵀ(F + (λ + η)I)δ: what of the model's curvature is not λ's."""
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
        if step_size.momentum and before.previous_delta is not None:
            directions.append(before.previous_delta)
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
        count = len(directions)
        seen = point.batch.seen_loss
        squares = _squares(network, point) if step_size.bounded else torch.zeros(())
        # All that the host has to know, in the step's one synchronisation.
        numbers = torch.cat(
            [
                gram.reshape(-1),
                _inner_products(directions, point.gradient),
                point.returned.double().reshape(1),
                point.loss.double().reshape(1),
                (point.loss if seen is None else seen).double().reshape(1),
                _health(factors).reshape(1),
                squares.to(gram).reshape(1),
            ]
        ).cpu()
        if not bool(numbers.isfinite().all()):
            check_finite(point, factors, network.layers)
            raise RefusedError("The curvature of the step is not finite.")
        fisher = numbers[: count**2].reshape(count, count)
        inner, r = numbers[count**2 : -5].reshape(count + 1, count).split([count, 1])
        Q = fisher + (before.lambda_ + point.weight_decay) * inner
        precision = torch.finfo(point.gradient[0].dtype).eps
        step = step_size.solve(Q, r[0], precision, before.confidence)
        if not math.isfinite(step.predicted_change):
            raise RefusedError("The predicted change of the objective is not finite.")
        returned, loss, seen_value, _, squared = numbers[-5:].tolist()
        penalty = point.weight_decay / 2 * squared
        delta = _combine(directions, step.coefficients)
        c = torch.tensor(step.coefficients, dtype=torch.float64)
        curvature, damped = (
            float(c @ (fisher + strength * inner) @ c)
            for strength in (point.weight_decay, before.lambda_ + point.weight_decay)
        )
    if step_size.cg_steps > 1:
        with watch("conjugate_gradients"):
            delta, change = _refined(
                network, point, before.lambda_, delta, inverse, step_size.cg_steps, rows
            )
            step = Step(step.coefficients, step.predicted_change + change)
    if step_size.bounded:
        # Where mini-batches differ, steps from a loss that is rounding error are long and lead anywhere,
        # which cases that are not among these have to pay for. Where they don't differ, such a step shows
        # at once, and is taken back.
        least = network.resolution(point.batch) if before.confirmed is not None else 0.0
        step, cut = within(step, loss + penalty, least)
        if cut < 1:
            delta = tuple(V.mul_(cut) for V in delta)
    return Proposal(
        gamma=gamma,
        inverse=inverse,
        decayed=decayed,
        step=step,
        delta=delta,
        loss=returned,
        penalty=penalty,
        loss_seen=seen is not None and point.seen(loss, seen_value, point.gradient[0].dtype),
        curvature_share=curvature / damped if damped > 0 else 1.0,
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


def _inner_products(directions: Sequence[Matrices], gradient: Matrices) -> Tensor:
    """v_iᵀv_j and, in a last row, ∇hᵀv_j, flattened, in float64.

    Layer by layer, all products of a layer in turn: they are bound by memory, and a layer's matrices
    stay in the cache.
    """
    total = torch.zeros((), dtype=torch.float64, device=gradient[0].device)
    for *V, g in zip(*directions, gradient, strict=True):
        rows = [v.reshape(-1) for v in (*V, g)]
        lower = [
            [torch.dot(rows[i], rows[j]) for j in range(min(i + 1, len(V)))]
            for i in range(len(rows))
        ]
        products = [lower[max(i, j)][min(i, j)] for i in range(len(rows)) for j in range(len(V))]
        total = total + torch.stack(products).double()
    return total


def _combine(directions: Sequence[Matrices], coefficients: Sequence[float]) -> Matrices:
    """Σ_j c_j v_j, in the memory of the first direction."""
    total = [V.mul_(coefficients[0]) for V in directions[0]]
    for direction, c in zip(directions[1:], coefficients[1:], strict=True):
        for V, W in zip(total, direction, strict=True):
            V.add_(W, alpha=c)
    return tuple(total)


def _squares(network: Network, point: Point) -> Tensor:
    """‖θ‖², where the objective has it."""
    if point.weight_decay == 0:
        return torch.zeros(())
    flat = [p.reshape(-1) for layer in network.layers for p in layer.parameters()]
    return torch.stack([torch.dot(p, p).double() for p in flat]).sum()


def _health(factors: KroneckerFactors) -> Tensor:
    """A number that is finite if the diagonals of all factors are."""
    return torch.stack([M.diagonal().sum() for M in (*factors.A, *factors.G)]).double().sum()
