"""(A ⊗ B − C ⊗ D)⁻¹ against the dense inverse."""

import pytest
import torch

from kronfac.linalg import decompose
from tests.conformance import CHECKS, as_matrix, assert_relative, single
from tests.conftest import normal, spd
from tests.reference import dense

IN, OUT = 5, 4


def root(M: torch.Tensor, columns: int, largest: float, seed: int) -> torch.Tensor:
    """R (n, columns) with the largest eigenvalue of M⁻¹RRᵀ as given."""
    R = normal(len(M), columns, seed=seed)
    if columns == 0:
        return R
    top = torch.linalg.eigvals(torch.linalg.solve(M, R @ R.mT)).real.max()
    return R * (largest / top) ** 0.5


def problem(columns_1: int, columns_2: int, largest: float = 0.95):
    A, B = spd(IN), spd(OUT, seed=1)
    R1, R2 = root(A, columns_1, largest, 2), root(B, columns_2, largest, 3)
    return A, B, R1, R2


def build(A, B, R1, R2):
    return decompose(torch.linalg.cholesky(A), torch.linalg.cholesky(B), R1, R2)


# Ranks of C = R₁R₁ᵀ and D = R₂R₂ᵀ: full, deficient, one, and roots with more columns than rows.
COLUMNS = [(IN, OUT), (2, 1), (1, OUT), (IN, 2), (IN + 3, OUT + 4), (2, OUT + 1)]


def difference_case(columns):
    A, B, R1, R2 = problem(*columns)
    return single(
        f"decompose{columns}",
        lambda: build(A, B, R1, R2).mv,
        lambda: dense.stein_dense(A, B, R1 @ R1.mT, R2 @ R2.mT, -1.0),
        (OUT, IN),
    )


CASES = [difference_case(columns) for columns in COLUMNS]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)


@pytest.mark.parametrize("columns", COLUMNS)
def test_to_dense_is_the_matrix_of_mv(columns):
    operator = build(*problem(*columns))
    assert_relative(operator.to_dense(), as_matrix(lambda V: (operator.mv(V[0]),), [(OUT, IN)]))


def test_a_zero_root_leaves_the_inverse_of_the_product():
    A, B, R1, R2 = problem(IN, OUT)
    operator = build(A, B, 0 * R1, R2)
    assert_relative(operator.to_dense(), dense.kron(A, B).inverse())


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-7, 1e-6, 1e-4])
def test_float32_near_singular_difference_stays_finite_and_positive(gap):
    """C = A and D = (1 − gap) B: the difference is gap · A ⊗ B, less than float32 can tell from 0."""
    L1 = torch.linalg.cholesky(spd(30)).float()
    L2 = torch.linalg.cholesky(spd(20, seed=1)).float()
    operator = decompose(L1, L2, L1, L2 * (1 - gap) ** 0.5)
    for seed in range(5):
        V = normal(20, 30, seed=seed, dtype=torch.float32)
        U = operator.mv(V)
        assert U.isfinite().all()
        assert (U * V).sum() > 0


def test_decomposition_caps_a_singular_difference_at_the_precision_of_its_dtype():
    """With s₁s₂ = 1 to rounding the gap is ε: (gap · A ⊗ B)⁻¹ with gap = ε."""
    A, B = spd(3), spd(2, seed=1)
    L1, L2 = torch.linalg.cholesky(A), torch.linalg.cholesky(B)
    eps = torch.finfo(torch.float64).eps
    operator = decompose(L1, L2, L1, L2)
    # s is 1 within a few ε, so the inverse lies between that of a gap ε and of a gap of 100 ε.
    actual = torch.linalg.eigvalsh(operator.to_dense())
    largest = torch.linalg.eigvalsh(dense.kron(A, B).inverse())[-1]
    assert largest / (100 * eps) < actual[-1] < largest / eps * 1.01
    assert actual[0] > 0


def test_near_singular_float64_difference_is_accurate_where_it_can_be():
    """A gap of 1e-6 loses six digits and no more."""
    A, B, R1, R2 = problem(3, 2, largest=(1 - 1e-6) ** 0.5)
    expected = dense.stein_dense(A, B, R1 @ R1.mT, R2 @ R2.mT, -1.0).inverse()
    assert_relative(build(A, B, R1, R2).to_dense(), expected, 1e-8)
