"""Linear algebra that knows nothing of networks: tensors in, tensors out."""

from kronfac.linalg.kronecker import (
    EigenKroneckerSum,
    KroneckerProduct,
    OuterProduct,
    kron,
    low_rank_pays,
)
from kronfac.linalg.kronecker_difference import (
    KroneckerDifferenceInverse,
    SmithDifferenceInverse,
    decompose,
    smith,
)
from kronfac.linalg.kronecker_sum import KroneckerSumInverse, invert_sum
from kronfac.linalg.parallel import each, in_background, take
from kronfac.linalg.spd import (
    Failure,
    add_to_diagonal,
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
    "EigenKroneckerSum",
    "Failure",
    "KroneckerDifferenceInverse",
    "KroneckerProduct",
    "KroneckerSumInverse",
    "OuterProduct",
    "SmithDifferenceInverse",
    "add_to_diagonal",
    "batched_inverse",
    "cholesky",
    "decompose",
    "each",
    "eigh",
    "in_background",
    "inverse",
    "inverse_from_cholesky",
    "invert_sum",
    "kron",
    "low_rank_pays",
    "shift_diagonal",
    "shifted_choleskys",
    "shifted_inverse",
    "shifted_inverses",
    "smith",
    "symmetrize",
    "take",
]
