"""Linear algebra that knows nothing of networks: tensors in, tensors out."""

from kronfac.linalg.kronecker import (
    EigenKroneckerSum,
    KroneckerProduct,
    OuterProduct,
    low_rank_pays,
)
from kronfac.linalg.kronecker_difference import (
    KroneckerDifferenceInverse,
    SmithDifferenceInverse,
    decompose,
    smith,
)
from kronfac.linalg.parallel import each, in_background
from kronfac.linalg.spd import (
    Failure,
    add_to_diagonal,
    cholesky,
    eigh,
    inverse,
    inverse_from_cholesky,
    shifted_choleskys,
    shifted_inverse,
    shifted_inverses,
    symmetrize,
)
from kronfac.linalg.take import take

__all__ = [
    "EigenKroneckerSum",
    "Failure",
    "KroneckerDifferenceInverse",
    "KroneckerProduct",
    "OuterProduct",
    "SmithDifferenceInverse",
    "add_to_diagonal",
    "cholesky",
    "decompose",
    "each",
    "eigh",
    "in_background",
    "inverse",
    "inverse_from_cholesky",
    "low_rank_pays",
    "shifted_choleskys",
    "shifted_inverse",
    "shifted_inverses",
    "smith",
    "symmetrize",
    "take",
]
