"""λ₀ from the problem, by trial steps on the first mini-batch: see `LambdaSearch`.

A trial is a whole step with γ = √(λ + η), computed and not taken, and its reduction ratio ρ.
"""

import math
from dataclasses import replace

from kronfac.control import ROUNDING
from kronfac.control.lambda_search import LambdaSearch
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.inverses import ApproximateInverse
from kronfac.measure import mean_curvature
from kronfac.minibatch import draws_masks
from kronfac.point import RefusedError, check_finite, objective_change
from kronfac.proposal import Proposer


def first_lambda(
    proposer: Proposer, inverse: ApproximateInverse, search: LambdaSearch | None
) -> tuple[float, int]:
    """λ₀ and the number of trials, starting at the proposer's λ or, if that is NaN, at the mean curvature.

    Raises:
        RefusedError: loss, gradient or statistics are not finite.
    """
    network, point, factors = proposer.network, proposer.point, proposer.factors
    check_finite(point, factors, network.layers)
    m, curvature = proposer.measurement, mean_curvature(factors)
    start = curvature if math.isnan(m.lambda_) else m.lambda_
    # Between two passes with other masks ρ says nothing.
    if search is None or draws_masks(network.model):
        return start, 0
    try:
        prepared = inverse.for_trials.prepare(factors)
    except (NonFiniteError, NotPositiveDefiniteError):
        return start, 0
    rounding = ROUNDING * m.precision * abs(float(point.loss))
    trial = proposer.for_trials()

    def rho(lambda_: float) -> float:
        gamma = math.sqrt(lambda_ + m.weight_decay)
        trial_step = replace(trial, measurement=replace(m, lambda_=lambda_))
        try:
            proposal = trial_step.propose(gamma, prepared.damped(gamma))
        except (RefusedError, NonFiniteError, NotPositiveDefiniteError):
            return -math.inf
        predicted = proposal.step.predicted_change
        if abs(predicted) <= rounding:
            return math.nan
        change = objective_change(network, point, proposal.loss_seen, proposal.delta)
        return change / predicted if predicted < 0 and math.isfinite(change) else -math.inf

    return search.least_trusted(rho, start, search.floor(curvature, m.weight_decay))
