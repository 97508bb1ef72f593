"""What the loss says: predictive distributions R_{y|z} over terms, with weights and a scale [MG15 §2.1]."""

from kronfac.objective.base import Likelihood, likelihood_loss
from kronfac.objective.bernoulli import Bernoulli
from kronfac.objective.categorical import Categorical
from kronfac.objective.gaussian import Gaussian
from kronfac.objective.losses import READERS
from kronfac.objective.objective import Objective, objective_of
from kronfac.objective.observe import observe
from kronfac.objective.terms import Terms

__all__ = [
    "READERS",
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Likelihood",
    "Objective",
    "Terms",
    "likelihood_loss",
    "objective_of",
    "observe",
]
