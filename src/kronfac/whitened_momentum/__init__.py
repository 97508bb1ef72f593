"""The everyday optimizer: momentum whitened by input factors and orthogonalised, for mini-batches."""

from kronfac.whitened_momentum.methods import InputFactors, ParameterPlan
from kronfac.whitened_momentum.optimizer import WhitenedMomentum

__all__ = ["InputFactors", "ParameterPlan", "WhitenedMomentum"]
