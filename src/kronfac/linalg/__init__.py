"""Linear algebra that knows nothing of networks: tensors in, tensors out."""

from kronfac.linalg.kronecker import (
    InverseInEigenbasis,
    KroneckerProduct,
    Matrices,
    OuterProduct,
    dot,
    kron,
    low_rank_pays,
    rotate,
    take,
)
from kronfac.linalg.kronecker_difference import (
    KroneckerDifferenceInverse,
    decompose,
)
from kronfac.linalg.kronecker_sum import KroneckerSumInverse, invert_sum
from kronfac.linalg.parallel import each, in_background
from kronfac.linalg.spd import (
    Failure,
    batched_inverse,
    cholesky,
    eigh,
    inverse,
    inverse_from_cholesky,
    shift_diagonal,
    shifted_choleskys,
    shifted_inverse,
    shifted_inverses,
    symmetrize,
)

__all__ = [
    "Failure",
    "InverseInEigenbasis",
    "KroneckerDifferenceInverse",
    "KroneckerProduct",
    "KroneckerSumInverse",
    "Matrices",
    "OuterProduct",
    "batched_inverse",
    "cholesky",
    "decompose",
    "dot",
    "each",
    "eigh",
    "in_background",
    "inverse",
    "inverse_from_cholesky",
    "invert_sum",
    "kron",
    "low_rank_pays",
    "rotate",
    "shift_diagonal",
    "shifted_choleskys",
    "shifted_inverse",
    "shifted_inverses",
    "symmetrize",
    "take",
]
