"""λ₀ from the problem: the least damping at which a step still does what the quadratic model says.

A trial is a whole step with γ = √(λ + η), computed and not taken, and its reduction ratio ρ on the first
mini-batch. More damping would lower the objective faster at first, along the few steepest directions;
where that leads, training is slower for long afterwards.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.factors import KroneckerFactors
from kronfac.inverses import ApproximateInverse
from kronfac.minibatch import Batch, draws_masks
from kronfac.point import (
    ROUNDING,
    Network,
    Point,
    RefusedError,
    check_finite,
    objective_change,
)
from kronfac.proposal import propose
from kronfac.report import Stopwatch
from kronfac.state import State
from kronfac.step_size import StepRule

FACTOR = 10.0
"""Between two trials."""
TRUSTED = 0.6
"""ρ of a step that the model describes well enough: between the ¼ and the ¾ of [MG15 §6.5]."""
MOST_TRIALS = 10
LEAST_CURVATURE = 1e-3
"""Of the mean curvature: the step of one mini-batch, by the curvature of the same one, looks good with any
damping; the next ones are the worse for too little."""
BELOW_DECAY = 0.1
"""Of η: a smaller λ damps nothing that the weight decay does not."""


def first_lambda(
    network: Network,
    point: Point,
    before: State,
    factors: KroneckerFactors,
    inverse: ApproximateInverse,
    step_size: StepRule,
    rows: Batch,
) -> tuple[float, int]:
    """λ₀, and the number of trials that it took; the search starts at λ, if one was given.

    `rows` are S₂.

    Raises:
        RefusedError: loss, gradient or statistics are not finite.
    """
    check_finite(point, factors, network.layers)
    start = mean_curvature(factors) if math.isnan(before.lambda_) else before.lambda_
    try:
        prepared = inverse.for_trials.prepare(factors)
    except (NonFiniteError, NotPositiveDefiniteError):
        return start, 0
    if draws_masks(network.model):
        return start, 0  # of two passes with other masks ρ says nothing
    rounding = ROUNDING * torch.finfo(point.gradient[0].dtype).eps * abs(float(point.loss))

    def rho(lambda_: float) -> float:
        gamma = math.sqrt(lambda_ + point.weight_decay)
        try:
            proposal = propose(
                network,
                replace(point, rows=None),
                replace(before, lambda_=lambda_),
                factors,
                gamma,
                prepared.damped(gamma),
                None,
                step_size,
                rows,
                Stopwatch(),
            )
        except (RefusedError, NonFiniteError, NotPositiveDefiniteError):
            return -math.inf
        predicted = proposal.step.predicted_change
        if abs(predicted) <= rounding:
            return math.nan
        change = objective_change(network, point, proposal.loss_seen, proposal.delta)
        return change / predicted if predicted < 0 and math.isfinite(change) else -math.inf

    floor = max(LEAST_CURVATURE * mean_curvature(factors), BELOW_DECAY * point.weight_decay)
    return least_trusted(rho, start, floor)


def mean_curvature(factors: KroneckerFactors) -> float:
    """tr F̆ / dim F̆, of the size of a typical eigenvalue; 1 where that is 0 or not finite."""
    trace = sum(
        float(A.diagonal().sum().double() * G.diagonal().sum().double())
        for A, G in zip(factors.A, factors.G, strict=True)
    )
    mean = trace / sum(len(A) * len(G) for A, G in zip(factors.A, factors.G, strict=True))
    return mean if 0 < mean < math.inf else 1.0


def least_trusted(
    rho: Callable[[float], float], start: float, floor: float = 0.0
) -> tuple[float, int]:
    """The x at which ρ falls to TRUSTED, between two neighbours of start · FACTORʲ.

    Downwards from `start` while ρ(x) is above, upwards until it is; where it is above for one of the two
    and below for the other, by interpolation in log x. At `floor`, and after the last trial, the last x;
    where ρ is NaN, which says nothing, the one before it.
    """
    trials, x, here = 1, start, rho(start)
    down = here >= TRUSTED
    while trials < MOST_TRIALS and not (down and x <= floor):
        following = max(x / FACTOR, floor) if down else x * FACTOR
        there = rho(following)
        trials += 1
        if math.isnan(here) or math.isnan(there):
            return x, trials
        if (there >= TRUSTED) != down:
            trusted, other = (here, there) if down else (there, here)
            share = (trusted - TRUSTED) / (trusted - max(other, 0.0))
            larger = max(x, following)
            return larger * (min(x, following) / larger) ** share, trials
        x, here = following, there
    return x, trials
