"""Linear algebra that knows nothing of networks: tensors in, tensors out."""

from kronfac.linalg.kronecker import InverseInEigenbasis as InverseInEigenbasis
from kronfac.linalg.kronecker import KroneckerProduct as KroneckerProduct
from kronfac.linalg.kronecker import Matrices as Matrices
from kronfac.linalg.kronecker import OuterProduct as OuterProduct
from kronfac.linalg.kronecker import dot as dot
from kronfac.linalg.kronecker import kron as kron
from kronfac.linalg.kronecker import low_rank_pays as low_rank_pays
from kronfac.linalg.kronecker import rotate as rotate
from kronfac.linalg.kronecker import take as take
from kronfac.linalg.kronecker_difference import (
    KroneckerDifferenceInverse as KroneckerDifferenceInverse,
)
from kronfac.linalg.kronecker_difference import decompose as decompose
from kronfac.linalg.kronecker_sum import KroneckerSumInverse as KroneckerSumInverse
from kronfac.linalg.kronecker_sum import invert_sum as invert_sum
from kronfac.linalg.parallel import each as each
from kronfac.linalg.parallel import in_background as in_background
from kronfac.linalg.spd import Failure as Failure
from kronfac.linalg.spd import cholesky as cholesky
from kronfac.linalg.spd import eigh as eigh
from kronfac.linalg.spd import inverse as inverse
from kronfac.linalg.spd import inverse_from_cholesky as inverse_from_cholesky
from kronfac.linalg.spd import shift_diagonal as shift_diagonal
from kronfac.linalg.spd import shifted_choleskys as shifted_choleskys
from kronfac.linalg.spd import shifted_inverse as shifted_inverse
from kronfac.linalg.spd import shifted_inverses as shifted_inverses
from kronfac.linalg.spd import symmetrize as symmetrize
