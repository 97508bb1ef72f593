"""Approximate inverses of the Fisher: F̆⁻¹ and F̂⁻¹ [MG15 §4]. Knows no modules, only matrices."""

from kronfac.inverses.base import ApproximateInverse, DampedInverse, PreparedInverse
from kronfac.inverses.block_diagonal import BlockDiagonalInverse
from kronfac.inverses.block_tridiagonal import BlockTridiagonalInverse
from kronfac.inverses.damping import ExactTikhonov, FactoredTikhonov, pi

__all__ = [
    "ApproximateInverse",
    "BlockDiagonalInverse",
    "BlockTridiagonalInverse",
    "DampedInverse",
    "ExactTikhonov",
    "FactoredTikhonov",
    "PreparedInverse",
    "pi",
]
