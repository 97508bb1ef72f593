"""What a step costs, in multiplications, in units of those of one gradient.

With F multiplications in a forward pass over an example, a gradient over m examples is 3 F m: one product
forwards and two backwards for every one of the network's. A step has besides

    statistics       on τ₁ m examples: a forward pass, unless `KFAC.closure` has kept that of the gradient
                     by hand, a backward pass without products for weights, and the second moments
    Fisher products  on τ₂ m examples: J v of Δ and of the momentum buffer
    refreshes        the inverses of all candidates for γ, once in T₃ iterations
    preconditioning  one product with the inverse
    validation       the loss before the last step on this mini-batch, now and then.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from kronfac.curvature import EigenvalueCorrectedInverse, ExactFisher, InverseCost
from kronfac.network import Batch, Network, sizes, subsets
from kronfac.planning.survey import BY_HAND, FORWARD_MODE, Survey
from kronfac.settings import LONGEST_INTERVAL, Settings

ITERATIONS = range(101, 201)
"""Iterations over which the mean is taken of what happens now and then."""
PASSES = {BY_HAND: 2.0, FORWARD_MODE: 3.0}
"""Forward passes that J v of one direction costs: V ā + W ȧ, and the pass itself if it has to be repeated;
two for a central difference."""


def curvature_examples(settings: Settings, network: Network, batch: Batch) -> tuple[Batch, Batch]:
    """S₁ and S₂, as large as a step draws them."""
    shares = settings.shares(batch.examples, batch.most_terms, convolutional=network.convolutional)
    if batch.random and not batch.traced:
        shares = shares[1], shares[1]
    S1, S2 = subsets(network, batch, sizes(batch, *shares), None)
    return S1, S2


def momentum_directions(settings: Settings) -> int:
    """How many directions a step is made of: Δ, and δ₀ with momentum."""
    return 2 if settings.step_size.momentum else 1


def step_cost(
    settings: Settings,
    survey: Survey,
    between: Sequence[InverseCost],
    examples: tuple[int, int, int],
    searches: bool,
) -> Mapping[str, float]:
    """The cost of a step in gradients, by part.

    Args:
        settings: what the user chose.
        survey: of the network.
        between: what neighbours in a chain take besides.
        examples: of the mini-batch, of S₁ and of S₂.
        searches: whether a refresh tries several γ.
    """
    m, m1, m2 = examples
    F = survey.forward
    gradient = gradient_cost(survey, m)
    costs = [*(unit.inverse for unit in survey.units), *between]
    moments = sum(unit.statistics for unit in survey.units)
    draws = survey.outputs if isinstance(settings.fisher, ExactFisher) else settings.fisher.draws
    if isinstance(settings.inverse, EigenvalueCorrectedInverse):
        # Inputs and gradients in the eigenbasis, and their products for every example.
        moments += sum(unit.statistics + unit.uses for unit in survey.units)
    again = 0.0 if survey.engine == BY_HAND else F
    directions = momentum_directions(settings) + settings.step_size.cg_steps - 1
    tried = 2 if searches else 1
    often = interval(settings)
    measured = [settings.damping.measures(k) for k in ITERATIONS]
    validations = sum(kind is not None for kind in measured) / len(measured)
    cost = {
        "gradient": gradient,
        "statistics": m1 * (again + draws * F + moments),
        "Fisher products": m2 * F * directions * PASSES.get(survey.engine, 2.0),
        "refreshes": inversions(settings, searches) * sum(cost.inversion for cost in costs) / often,
        "preconditioning": (1 + (tried - 1) / often) * sum(cost.product for cost in costs),
        "validation": validations * F * m,
    }
    return MappingProxyType({name: value / gradient for name, value in cost.items()})


def gradient_cost(survey: Survey, examples: int) -> float:
    """Multiplications of a gradient."""
    return max(3 * survey.forward * examples, 1.0)


def inversions(settings: Settings, searches: bool) -> int:
    """Inverses of every unit that a refresh makes; eigenvectors do not depend on γ."""
    return 2 if searches and not isinstance(settings.inverse, EigenvalueCorrectedInverse) else 1


def interval(settings: Settings) -> int:
    """Iterations from one refresh to the next, once those that grow have grown."""
    return settings.inverse_interval or LONGEST_INTERVAL
