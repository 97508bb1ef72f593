"""What the loss says: predictive distributions R_{y|z} over terms, with weights and a scale [MG15 §2.1]."""

from kronfac.objective.base import Likelihood, likelihood_loss
from kronfac.objective.bernoulli import Bernoulli
from kronfac.objective.categorical import Categorical
from kronfac.objective.elementwise import ElementwiseLikelihood
from kronfac.objective.gauss_newton import GaussNewton
from kronfac.objective.gaussian import Gaussian
from kronfac.objective.heteroscedastic import HeteroscedasticGaussian
from kronfac.objective.huber import Huber
from kronfac.objective.joined import JOINED
from kronfac.objective.least_squares import least_squares
from kronfac.objective.losses import READERS
from kronfac.objective.objective import Objective, UnknownLoss, is_loss, objective_of
from kronfac.objective.observe import LISTENERS, observe
from kronfac.objective.poisson import Poisson
from kronfac.objective.probability import BernoulliProbability
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
    "UnknownLoss",
    "is_loss",
    "least_squares",
    "likelihood_loss",
    "objective_of",
    "observe",
]
