"""λ₀ from the problem: the least damping at which a step still does what the quadratic model says.

A trial is a whole step with γ = √(λ + η), computed and not taken, and its reduction ratio ρ on the first
mini-batch. More damping would lower the objective faster at first, along the few steepest directions;
where that leads, training is slower for long afterwards.
"""

import math
from collections.abc import Callable
from dataclasses import replace

from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.factors import KroneckerFactors
from kronfac.inverses import ApproximateInverse
from kronfac.proposal import Network, Point, RefusedError, objective_change, propose
from kronfac.report import Stopwatch
from kronfac.state import State
from kronfac.step_size import StepRule

FACTOR = 10.0
"""Between two trials; the rule that λ moves by from there makes good for half a decade at once."""
TRUSTED = 0.5
"""ρ of a step that the model describes well enough: between the ¼ and the ¾ of [MG15 §6.5]."""
MOST_TRIALS = 8


def first_lambda(
    network: Network,
    point: Point,
    before: State,
    factors: KroneckerFactors,
    inverse: ApproximateInverse,
    step_size: StepRule,
    fisher_fraction: float,
) -> tuple[float, int]:
    """λ₀, and the number of trials that it took; the search starts at λ, if one was given."""
    prepared = inverse.for_trials.prepare(factors)

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
                fisher_fraction,
                Stopwatch(),
            )
        except (RefusedError, NonFiniteError, NotPositiveDefiniteError):
            return -math.inf
        predicted = proposal.step.predicted_change
        change = objective_change(network, point, proposal.loss_seen, proposal.delta)
        return change / predicted if predicted < 0 and math.isfinite(change) else -math.inf

    start = mean_curvature(factors) if math.isnan(before.lambda_) else before.lambda_
    return least_trusted(rho, start)


def mean_curvature(factors: KroneckerFactors) -> float:
    """tr F̆ / dim F̆, of the size of a typical eigenvalue; 1 where that is 0 or not finite."""
    trace = sum(
        float(A.diagonal().sum().double() * G.diagonal().sum().double())
        for A, G in zip(factors.A, factors.G, strict=True)
    )
    mean = trace / sum(len(A) * len(G) for A, G in zip(factors.A, factors.G, strict=True))
    return mean if 0 < mean < math.inf else 1.0


def least_trusted(rho: Callable[[float], float], start: float) -> tuple[float, int]:
    """The smallest x = start · FACTORʲ that can be reached from `start` with ρ(x) ≥ TRUSTED.

    Downwards while that holds; upwards until it does. After the last trial the last x.
    """
    trials, x = 1, start
    down = rho(x) >= TRUSTED
    while trials < MOST_TRIALS:
        x = x / FACTOR if down else x * FACTOR
        trials += 1
        trusted = rho(x) >= TRUSTED
        if down and not trusted:
            return x * FACTOR, trials
        if not down and trusted:
            break
    return x, trials
