"""λ₀ from the problem, by trial steps on the first mini-batch: see `LambdaSearch`.

A trial is a whole step with γ = √(λ + η), computed and not taken, and its reduction ratio ρ.
"""

import math
from dataclasses import replace

from kronfac.control import ROUNDING
from kronfac.control.lambda_search import LambdaSearch
from kronfac.curvature import ApproximateInverse
from kronfac.distributed import Holders
from kronfac.divided_refresh import prepare_over_ranks
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError, out_of_memory
from kronfac.evaluation import RefusedError
from kronfac.proposal import Proposer


def first_lambda(
    proposer: Proposer,
    inverse: ApproximateInverse,
    search: LambdaSearch | None,
    inverse_share: float = 1.0,
) -> tuple[float, int]:
    """λ₀ and the number of trials, starting at the proposer's λ or, if that is NaN, at the mean curvature.

    Raises:
        RefusedError: loss, gradient or statistics are not finite.
    """
    point, evaluation = proposer.point, proposer.point.evaluation
    point.check_finite(proposer.curvature)
    m, curvature = proposer.measurement, proposer.curvature.mean()
    start = curvature if math.isnan(m.lambda_) else m.lambda_
    if search is None or not evaluation.comparable():
        return start, 0
    try:
        holders = Holders.of(evaluation.spread.world, inverse_share)
        prepared = prepare_over_ranks(inverse.for_trials, proposer.curvature, holders)
    except (NonFiniteError, NotPositiveDefiniteError):
        return start, 0
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return start, 0
    rounding = ROUNDING * m.precision * abs(float(evaluation.loss))
    trial = proposer.for_trials()

    def rho(lambda_: float) -> float:
        gamma = math.sqrt(lambda_ + m.weight_decay)
        trial_step = replace(trial, measurement=replace(m, lambda_=lambda_))
        try:
            damped = prepared.damped(gamma)
            if damped.failures:
                return -math.inf
            proposal = trial_step.propose(gamma, damped)
        except (RefusedError, NonFiniteError, NotPositiveDefiniteError):
            return -math.inf
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return -math.inf
        predicted = proposal.step.predicted_change
        if abs(predicted) <= rounding:
            return math.nan
        change = evaluation.change(proposal.delta, proposal.loss_seen)
        return change / predicted if predicted < 0 and math.isfinite(change) else -math.inf

    return search.least_trusted(rho, start, search.floor(curvature, m.weight_decay))
