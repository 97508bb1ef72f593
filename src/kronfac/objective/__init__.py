"""What the loss says: predictive distributions R_{y|z} over terms, with weights and a scale [MG15 §2.1]."""

from kronfac.objective.gauss_newton import GaussNewton
from kronfac.objective.likelihoods import (
    Bernoulli,
    BernoulliProbability,
    Categorical,
    ElementwiseLikelihood,
    Gaussian,
    HeteroscedasticGaussian,
    Huber,
    Likelihood,
    Poisson,
    likelihood_loss,
)
from kronfac.objective.losses import JOINED, READERS
from kronfac.objective.objective import Objective, is_loss, objective_of
from kronfac.objective.observe import LISTENERS, least_squares, observe
from kronfac.objective.terms import Terms

__all__ = [
    "JOINED",
    "LISTENERS",
    "READERS",
    "Bernoulli",
    "BernoulliProbability",
    "Categorical",
    "ElementwiseLikelihood",
    "GaussNewton",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Huber",
    "Likelihood",
    "Objective",
    "Poisson",
    "Terms",
    "is_loss",
    "least_squares",
    "likelihood_loss",
    "objective_of",
    "observe",
]
