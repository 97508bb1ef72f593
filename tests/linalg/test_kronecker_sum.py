"""(A ⊗ B + C ⊗ D)⁻¹ against the dense inverse, for full and diagonal sides."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.linalg import invert_sum
from kronfac.storage import pack, unpack
from tests.conformance import CHECKS, assert_relative, single
from tests.conftest import normal, psd, spd
from tests.reference import dense

IN, OUT = 4, 3
KINDS = {"full": lambda M: M, "diagonal": lambda M: M.diagonal().clone()}


def factors(kinds: tuple[str, ...], rank: int = 9) -> list[torch.Tensor]:
    matrices = [spd(IN), spd(OUT, seed=1), psd(IN, rank, seed=2), psd(OUT, rank, seed=3)]
    return [KINDS[kind](M) for kind, M in zip(kinds, matrices, strict=True)]


def full(M: torch.Tensor) -> torch.Tensor:
    return torch.diag(M) if M.dim() == 1 else M


def truth(A, B, C, D) -> torch.Tensor:
    return dense.kron(full(A), full(B)) + dense.kron(full(C), full(D))


def case(kinds, rank):
    matrices = factors(kinds, rank)
    return single(
        f"{'-'.join(kinds)}-rank {rank}",
        lambda: unpack(pack(invert_sum(*matrices))).mv,
        lambda: truth(*matrices),
        (OUT, IN),
    )


CASES = [case(kinds, rank) for kinds in product(KINDS, repeat=4) for rank in (9, 1, 0)]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)


@pytest.mark.parametrize("kinds", list(product(KINDS, repeat=4)), ids="-".join)
def test_the_dense_form_is_the_dense_inverse(kinds):
    matrices = factors(kinds)
    assert_relative(invert_sum(*matrices).to_dense(), torch.linalg.inv(truth(*matrices)))


def test_diagonal_sides_stay_vectors():
    """Nothing of size rows × rows is made for a vocabulary."""
    rows = 200_000
    B, D = normal(rows).square() + 0.1, normal(rows, seed=1).square()
    inverse = invert_sum(spd(IN), B, psd(IN, 2, seed=1), D)
    assert inverse.K2.shape == inverse.s2.shape == (rows,)
    V = normal(rows, IN)
    U = inverse.mv(V)
    for row in (0, rows - 1):
        matrix = B[row] * spd(IN) + D[row] * psd(IN, 2, seed=1)
        assert_close(U[row], torch.linalg.solve(matrix, V[row]), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e3])
def test_float32_keeps_it_positive_however_different_the_products_are(scale):
    A, B, C, D = (M.float() for M in factors(("full",) * 4, rank=2))
    matrix = invert_sum(A, B, scale * C, D).to_dense().double()
    assert torch.linalg.eigvalsh((matrix + matrix.mT) / 2)[0] > 0
    expected = torch.linalg.inv(truth(*(M.double() for M in (A, B, scale * C, D))))
    assert_relative(matrix, expected, 1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_side_that_is_not_positive_is_refused(kind, bad):
    A, B, C, D = factors((kind,) * 4)
    with pytest.raises((NotPositiveDefiniteError, NonFiniteError), match="output side"):
        invert_sum(A, torch.full_like(B, bad), C, D)
