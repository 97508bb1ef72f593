"""Predictive distributions R_{y|z}: loss, sampled targets and Fisher in output space [MG15 §2.1]."""

from kronfac.objective.base import Likelihood
from kronfac.objective.bernoulli import Bernoulli
from kronfac.objective.categorical import Categorical
from kronfac.objective.gaussian import Gaussian
from kronfac.objective.objective import Objective, objective_of

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "Objective", "objective_of"]
