"""λ₀ from the problem: the λ whose step lowers the objective most, in a few trials on the first mini-batch.

A trial is a whole step with γ = √(λ + η), computed and not taken, and the objective after it.
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
"""Between two trials. The rule that λ moves by from there makes good for half a decade at once."""
WORTHWHILE = 1.05
"""By so much a trial must be better than the best before it for the search to go on."""
MOST_TRIALS = 8


def first_lambda(
    network: Network,
    point: Point,
    before: State,
    factors: KroneckerFactors,
    inverse: ApproximateInverse,
    step_size: StepRule,
    fisher_fraction: float,
    watch: Stopwatch,
) -> tuple[float, int]:
    """λ₀, and the number of trials that it took; the search starts at λ, if one was given."""
    prepared = inverse.for_trials.prepare(factors)

    def decrease(lambda_: float) -> float:
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
                watch,
            )
        except (RefusedError, NonFiniteError, NotPositiveDefiniteError):
            return -math.inf
        change = objective_change(network, point, proposal.loss_seen, proposal.delta)
        return -math.inf if math.isnan(change) else -change

    start = mean_curvature(factors) if math.isnan(before.lambda_) else before.lambda_
    return best_by_factors(decrease, start)


def mean_curvature(factors: KroneckerFactors) -> float:
    """tr F̆ / dim F̆, of the size of a typical eigenvalue; 1 where that is 0 or not finite."""
    trace = sum(
        float(A.diagonal().sum().double() * G.diagonal().sum().double())
        for A, G in zip(factors.A, factors.G, strict=True)
    )
    mean = trace / sum(len(A) * len(G) for A, G in zip(factors.A, factors.G, strict=True))
    return mean if 0 < mean < math.inf else 1.0


def best_by_factors(gain: Callable[[float], float], start: float) -> tuple[float, int]:
    """The x = start · FACTORʲ with the largest gain, uphill from `start`, downwards first."""
    best, highest = start, gain(start)
    trials = 1
    for factor in (1 / FACTOR, FACTOR):
        x, found = best, False
        while trials < MOST_TRIALS:
            x *= factor
            value = gain(x)
            trials += 1
            worthwhile = value > (WORTHWHILE * highest if highest > 0 else highest)
            if value > highest:
                best, highest = x, value
            # Where nothing has worked so far, more damping may.
            if not worthwhile and not (highest == -math.inf and factor > 1):
                break
            found = found or worthwhile
        if found:
            break
    return best, trials
