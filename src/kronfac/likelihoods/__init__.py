"""Predictive distributions R_{y|z}: loss, sampled targets and Fisher in output space [MG15 §2.1]."""

from kronfac.likelihoods.base import Likelihood
from kronfac.likelihoods.bernoulli import Bernoulli
from kronfac.likelihoods.categorical import Categorical
from kronfac.likelihoods.gaussian import Gaussian
from kronfac.likelihoods.objective import Objective, objective_of

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "Objective", "objective_of"]
