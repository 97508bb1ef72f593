"""Differential equations: derivatives of a network by its inputs, and an optimizer for their residuals."""

from kronfac.physics.derivatives import Jet, JetColumns, Sin, Slopes, Smooth, WithDerivatives
from kronfac.physics.levenberg_marquardt import DenseLevenbergMarquardt, DenseReport

__all__ = [
    "DenseLevenbergMarquardt",
    "DenseReport",
    "Jet",
    "JetColumns",
    "Sin",
    "Slopes",
    "Smooth",
    "WithDerivatives",
]
