"""The curvature of the units: blocks, their statistics and their inverses [MG15 §3–§6.3]."""

from kronfac.curvature.base import Block, Moments, Operator, SummedGradient, Tap, Taps
from kronfac.curvature.block_diagonal import BlockDiagonalInverse
from kronfac.curvature.block_tridiagonal import BlockTridiagonalInverse
from kronfac.curvature.curvature import Curvature, Link, ema_decay
from kronfac.curvature.damping import ExactTikhonov, FactoredTikhonov
from kronfac.curvature.dense import DenseBlock, DenseMoments
from kronfac.curvature.diagonal import DiagonalBlock, DiagonalMoments
from kronfac.curvature.eigenvalue_corrected import EigenvalueCorrectedInverse
from kronfac.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, SampledFisher
from kronfac.curvature.inverse import ApproximateInverse, DampedInverse
from kronfac.curvature.kronecker import KroneckerBlock, KroneckerMoments

__all__ = [
    "ApproximateInverse",
    "Block",
    "BlockDiagonalInverse",
    "BlockTridiagonalInverse",
    "Curvature",
    "DampedInverse",
    "DenseBlock",
    "DenseMoments",
    "DiagonalBlock",
    "DiagonalMoments",
    "EigenvalueCorrectedInverse",
    "EmpiricalFisher",
    "ExactFisher",
    "ExactTikhonov",
    "FactoredTikhonov",
    "Fisher",
    "KroneckerBlock",
    "KroneckerMoments",
    "Link",
    "Moments",
    "Operator",
    "SampledFisher",
    "SummedGradient",
    "Tap",
    "Taps",
    "ema_decay",
]
