"""λ₀ from the problem: by trial steps on the first mini-batch (`LambdaSearch`), and not below a floor.

A trial is a whole step with γ = √(λ + η), computed and not taken, and its reduction ratio ρ. The floor
follows from the gradient (`least_by_gradient`): where predictions are confident and wrong, the Fisher
vanishes, M promises the whole objective with any small λ, and trials can't tell one λ from another.
"""

import math
from dataclasses import replace

from kronfac.control import ROUNDING
from kronfac.control.damping import LambdaSearch
from kronfac.curvature import ApproximateInverse
from kronfac.errors import out_of_memory
from kronfac.linearize import fisher_gram
from kronfac.report import Stopwatch
from kronfac.settings import Settings
from kronfac.step.evaluation import RefusedError
from kronfac.step.inverses import Inverter
from kronfac.step.proposal import Proposer, model_numbers
from kronfac.step.state import State, initial_gamma


def with_first_damping(settings: Settings, proposer: Proposer, before: State) -> tuple[State, int]:
    """The state with λ₀ and γ₀, and the number of trial steps, 0 if the rule keeps its own λ."""
    rule = settings.damping
    if rule.search is None and not rule.floored and not math.isnan(proposer.measurement.lambda_):
        return before, 0
    lambda_, trials = first_lambda(proposer, settings.inverse, settings.damping.search)
    damping = replace(before.damping, lambda_=lambda_)
    gamma = initial_gamma(settings, damping, proposer.measurement.weight_decay)
    return replace(before, damping=damping, gamma=gamma), trials


def first_lambda(
    proposer: Proposer, inverse: ApproximateInverse, search: LambdaSearch | None
) -> tuple[float, int]:
    """λ₀ and the number of trials, starting at the proposer's λ or, if that is NaN, at the mean curvature.

    Neither the start nor what the search finds is below the floor by the gradient.

    Raises:
        RefusedError: loss, gradient or statistics are not finite.
    """
    evaluation = proposer.evaluation
    evaluation.check_finite(proposer.curvature)
    m, curvature = proposer.measurement, proposer.curvature.mean()
    floor = least_by_gradient(proposer)
    start = max(curvature if math.isnan(m.lambda_) else m.lambda_, floor)
    if search is None:
        return start, 0
    inverter = Inverter(inverse.for_trials, proposer.curvature, evaluation.world)
    if inverter.failure is not None:
        return start, 0
    rounding = ROUNDING * m.precision * abs(float(evaluation.loss))
    trial = replace(proposer, watch=Stopwatch())  # which no step has on its clock

    def rho(lambda_: float) -> float:
        gamma = math.sqrt(lambda_ + m.weight_decay)
        trial_step = replace(trial, measurement=replace(m, lambda_=lambda_))
        damped = inverter.damped(gamma)
        if isinstance(damped, Exception) or damped.failures:
            return -math.inf
        try:
            proposal = trial_step.propose(gamma, damped)
        except RefusedError:
            return -math.inf
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
            return -math.inf
        predicted = proposal.step.predicted_change
        if abs(predicted) <= rounding:
            return math.nan
        change = evaluation.change(proposal.delta)
        return change / predicted if predicted < 0 and math.isfinite(change) else -math.inf

    floor = max(search.floor(curvature, m.weight_decay), floor)
    return search.least_trusted(rho, start, floor)


def least_by_gradient(proposer: Proposer) -> float:
    """The smallest λ at which M promises no more than the whole objective along the gradient.

    Along −c g, with g = ∇h and c ≥ 0, M is smallest at

        h(θ) − ‖g‖⁴ / (2 gᵀ(F + (λ + η)I)g).

    The loss of class probabilities is never negative. If this is, M lacks curvature, which λ has to supply:

        λ ≥ ‖g‖² / (2 h(θ)) − gᵀ(F + ηI)g / ‖g‖².

    For ordinary networks the right-hand side is negative, and the floor is 0. For squared residuals this is
    the Cauchy–Schwarz inequality, (gᵀg)² = (rᵀJg)² ≤ ‖r‖² ‖Jg‖² = 2h gᵀFg, and nothing is computed. Where a
    softmax or sigmoid is saturated at the wrong class, F = 0 and the floor is ‖g‖²/2h, the curvature of a
    parabola with this slope that touches 0.

    F is that of the whole mini-batch: the few examples that have curvature may be missing in S₂.
    """
    evaluation = proposer.evaluation
    if not evaluation.resolution:  # no loss of class probabilities
        return 0.0
    g, world = evaluation.gradient, evaluation.world
    try:
        gram = fisher_gram(proposer.network, evaluation.batch, [g], world=world)
        found = model_numbers(evaluation, proposer.curvature, [g], gram, proposer.rule.bounded)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return 0.0
    if found is None:
        return 0.0
    objective, (squares,) = found.loss + found.penalty, found.slopes
    if objective <= 0 or squares <= 0:
        return 0.0
    return max(squares / (2 * objective) - found.damped(0.0)[0][0] / squares, 0.0)
