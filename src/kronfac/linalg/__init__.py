"""Linear algebra that knows nothing of networks: tensors in, tensors out."""

from kronfac.linalg.kronecker import EigenKroneckerSum, KroneckerProduct
from kronfac.linalg.kronecker_difference import (
    KroneckerDifferenceInverse,
    SmithDifferenceInverse,
    decompose,
    smith,
)
from kronfac.linalg.spd import cholesky, eigh, inverse, inverse_from_cholesky, symmetrize

__all__ = [
    "EigenKroneckerSum",
    "KroneckerDifferenceInverse",
    "KroneckerProduct",
    "SmithDifferenceInverse",
    "cholesky",
    "decompose",
    "eigh",
    "inverse",
    "inverse_from_cholesky",
    "smith",
    "symmetrize",
]
