import pytest
import torch
from torch.testing import assert_close

from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.linalg import cholesky, eigh, inverse, inverse_from_cholesky
from tests.conftest import ALGEBRA, normal, psd, spd

# ------------------------------------------------------------------------------------ Cholesky


@pytest.mark.parametrize("size", [1, 5, 40])
def test_cholesky_of_a_positive_definite_matrix(size):
    A = spd(size)
    L = cholesky(A)
    assert_close(L @ L.mT, A, **ALGEBRA)
    assert torch.equal(L, L.tril())


def test_cholesky_reads_the_lower_triangle_alone():
    A = spd(5)
    assert torch.equal(cholesky(A.tril() + normal(5, 5).triu(1)), cholesky(A))


def test_cholesky_goes_to_float64_where_float32_fails_on_a_positive_definite_matrix():
    # Columns scaled over six decades: positive definite, but not in float32 arithmetic.
    for seed in range(100):
        X = normal(12, 12, seed=seed)
        X[:, -1] = X[:, :-1].sum(1) + 3e-4 * X[:, -1]
        A = (X.mT @ X).float()
        fails = int(torch.linalg.cholesky_ex(A)[1]) != 0
        wide, info = torch.linalg.cholesky_ex(A.double())
        if fails and int(info) == 0:
            break
    else:
        pytest.fail("no matrix of the kind found")
    L = cholesky(A)
    assert L.dtype == torch.float32
    assert torch.equal(L, wide.float())


def test_cholesky_adds_jitter_to_a_matrix_that_rounding_made_indefinite():
    A = psd(30, 20).float()
    assert torch.linalg.eigvalsh(A.double())[0] < 0  # rounding did it
    L = cholesky(A).double()
    difference = L @ L.mT - A.double()
    # At most 1e-7 of the mean eigenvalue, plus the rounding of L to float32.
    mean = A.diagonal().mean().double()
    assert torch.linalg.matrix_norm(difference, 2) < 1e-7 * mean + 30 * 1.2e-7 * mean
    assert L.diagonal().min() > 0


def test_cholesky_uses_the_smallest_jitter_that_will_do():
    A = psd(6, 3)
    A -= 1e-11 * A.diagonal().mean() * torch.eye(6, dtype=torch.float64)
    L = cholesky(A)
    added = (L @ L.mT - A).diagonal() / A.diagonal().mean()
    assert_close(added, torch.full_like(added, 1e-9), rtol=1e-4, atol=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [(0, 0), (3, 1), (4, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cholesky_of_a_matrix_with_non_finite_entries(bad, place, dtype):
    A = spd(5).to(dtype)
    A[place] = A[place[::-1]] = bad
    with pytest.raises(NonFiniteError, match=r"A\[1\] \(5 × 5\) holds NaN or infinity"):
        cholesky(A, "A[1]")


def test_cholesky_of_an_indefinite_matrix_names_it_and_its_smallest_eigenvalue():
    A = torch.diag(torch.tensor([2.0, 1.0, -0.25]))
    with pytest.raises(NotPositiveDefiniteError, match=r"G\[0\] .* smallest eigenvalue is -0\.25"):
        cholesky(A, "G[0]")


# -------------------------------------------------------------------------------------- inverse


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inverse_is_the_inverse_and_symmetric_to_the_last_bit(dtype):
    A = spd(50).to(dtype)
    inv = inverse(A)
    assert torch.equal(inv, inv.mT)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    assert_close(inv.double() @ A.double(), torch.eye(50).double(), rtol=0, atol=tolerance)
    assert torch.equal(inv, inverse_from_cholesky(cholesky(A)))


# ---------------------------------------------------------------------------- eigendecomposition


@pytest.mark.parametrize("rank", [0, 1, 4, 8])
def test_eigh_of_a_positive_semi_definite_matrix(rank):
    A = psd(8, rank)
    values, vectors = eigh(A)
    assert_close(vectors @ values.diag() @ vectors.mT, A, **ALGEBRA)
    assert_close(vectors.mT @ vectors, torch.eye(8).double(), **ALGEBRA)
    assert (values >= 0).all()
    assert torch.equal(values, values.sort().values)
    assert int((values > 1e-12).sum()) == rank


def test_eigh_sets_eigenvalues_that_rounding_made_negative_to_zero():
    A = psd(30, 2).float()
    assert torch.linalg.eigvalsh(A)[0] < 0
    values, _ = eigh(A)
    assert values.min() == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eigh_of_a_matrix_with_non_finite_entries(bad, dtype):
    A = spd(4).to(dtype)
    A[2, 1] = A[1, 2] = bad
    with pytest.raises(NonFiniteError, match=r"A\[0\] \(4 × 4\)"):
        eigh(A, "A[0]")


@pytest.mark.parametrize("how", ["raises", "nan_vectors", "nan_values"])
def test_eigh_goes_to_float64_where_float32_fails(monkeypatch, how):
    """Both ways in which float32 eigh was seen to fail, brought about on purpose."""
    genuine = torch.linalg.eigh

    def failing(M):
        if M.dtype == torch.float64:
            return genuine(M)
        if how == "raises":
            raise torch.linalg.LinAlgError("linalg.eigh: failed to converge")
        values, vectors = genuine(M)
        (vectors if how == "nan_vectors" else values)[..., 1] = float("nan")
        return values, vectors

    monkeypatch.setattr(torch.linalg, "eigh", failing)
    A = spd(6).float()
    values, vectors = eigh(A)
    assert values.dtype == vectors.dtype == torch.float32
    expected = genuine(A.double())
    assert torch.equal(values, expected[0].float())
    assert torch.equal(vectors, expected[1].float())
