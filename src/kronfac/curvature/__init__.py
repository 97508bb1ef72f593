"""The curvature of the units: blocks, their statistics and their inverses [MG15 §3–§6.3]."""

from kronfac.curvature.block import Block, InverseCost, Moments, Operator
from kronfac.curvature.block_diagonal import BlockDiagonalInverse
from kronfac.curvature.block_tridiagonal import BlockTridiagonalInverse
from kronfac.curvature.dense import DenseBlock, DenseMoments
from kronfac.curvature.diagonal import DiagonalBlock, DiagonalMoments
from kronfac.curvature.ekfac import EigenvalueCorrectedInverse
from kronfac.curvature.estimate import ema_decay
from kronfac.curvature.fisher import EmpiricalFisher, ExactFisher, Fisher, SampledFisher
from kronfac.curvature.grouped import GroupedKroneckerBlock, GroupedKroneckerMoments
from kronfac.curvature.inverse import ApproximateInverse, Curvature, DampedInverse, Link
from kronfac.curvature.kronecker import KroneckerBlock, KroneckerMoments
from kronfac.curvature.taps import (
    AnyTap,
    ElementwiseTap,
    GroupedTap,
    Inputs,
    OneHot,
    SummedGradient,
    Tap,
    Taps,
)
from kronfac.curvature.tied import KroneckerSumBlock, KroneckerSumMoments
from kronfac.curvature.tikhonov import ExactTikhonov, FactoredTikhonov

__all__ = [
    "AnyTap",
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
    "ElementwiseTap",
    "EmpiricalFisher",
    "ExactFisher",
    "ExactTikhonov",
    "FactoredTikhonov",
    "Fisher",
    "GroupedKroneckerBlock",
    "GroupedKroneckerMoments",
    "GroupedTap",
    "Inputs",
    "InverseCost",
    "KroneckerBlock",
    "KroneckerMoments",
    "KroneckerSumBlock",
    "KroneckerSumMoments",
    "Link",
    "Moments",
    "OneHot",
    "Operator",
    "SampledFisher",
    "SummedGradient",
    "Tap",
    "Taps",
    "ema_decay",
]
