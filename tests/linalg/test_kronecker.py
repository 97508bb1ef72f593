import pytest
import torch
from torch.testing import assert_close

from kronfac.linalg import InverseInEigenbasis, KroneckerProduct, OuterProduct, eigh, low_rank_pays
from tests.conformance import CHECKS, as_matrix, assert_relative, single
from tests.conftest import ALGEBRA, normal, psd, spd
from tests.reference import dense

IN, OUT = 5, 3


def eigen_sum(C, D, xi):
    (s_C, E_C), (s_D, E_D) = eigh(C), eigh(D)
    damping = torch.full_like(s_C, xi), torch.zeros_like(s_D)
    return InverseInEigenbasis(E_C, E_D, torch.outer(s_D, s_C), *damping)


def eigen_sum_case(rank_C, rank_D):
    C, D, identity = psd(IN, rank_C), psd(OUT, rank_D, seed=1), torch.eye(IN * OUT).double()
    return single(
        f"eigen_sum_of_ranks_{rank_C}_{rank_D}",
        lambda: eigen_sum(C, D, 0.37).mv,
        lambda: dense.kron(C, D) + 0.37 * identity,
        (OUT, IN),
    )


CASES = [
    single(
        "product_of_inverses",
        lambda: KroneckerProduct(spd(IN).inverse(), spd(OUT, seed=1).inverse()).mv,
        lambda: dense.kron(spd(IN), spd(OUT, seed=1)),
        (OUT, IN),
    ),
    eigen_sum_case(IN, OUT),
    eigen_sum_case(2, 1),
    eigen_sum_case(0, OUT),
]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)


def test_product_multiplies_as_the_dense_matrix_does():
    A, G, V = spd(IN), spd(OUT, seed=1), normal(OUT, IN, seed=2)
    product = KroneckerProduct(A, G)
    assert_close(dense.vec(product.mv(V)), dense.kron(A, G) @ dense.vec(V), **ALGEBRA)
    assert_close(product.to_dense(), dense.kron(A, G), **ALGEBRA)


def test_eigen_sum_to_dense():
    operator = eigen_sum(spd(IN), spd(OUT, seed=1), 0.37)
    expected = as_matrix(lambda V: (operator.mv(V[0]),), [(OUT, IN)])
    assert_relative(operator.to_dense(), expected)


@pytest.mark.parametrize("cases", [1, 4, 20])
def test_low_rank_route_equals_the_product_with_the_gradient(cases):
    product = KroneckerProduct(spd(IN), spd(OUT, seed=1))
    output_grads, inputs = normal(cases, OUT, seed=2), normal(cases, IN, seed=3)
    expected = product.mv(output_grads.mT @ inputs)
    assert_close(product.mv(OuterProduct(output_grads, inputs)), expected, **ALGEBRA)


@pytest.mark.parametrize(
    ("d_in", "d_out", "most_cases"),
    [
        # mv: d_out d_in (d_in + d_out) multiplications; low rank: m (d_in² + d_out² + d_in d_out).
        (100, 100, 66),  # 2 000 000 / 30 000 = 66.7
        (10, 1, 0),  # 110 / 111 < 1
        (30, 60, 25),  # 162 000 / 6 300 = 25.7
    ],
)
def test_low_rank_pays_up_to_where_multiplications_are_equal(d_in, d_out, most_cases):
    assert most_cases == 0 or low_rank_pays((d_out, d_in), most_cases)
    assert not low_rank_pays((d_out, d_in), most_cases + 1)
    more = OuterProduct(normal(most_cases + 1, d_out), normal(most_cases + 1, d_in))
    assert not more.pays()
    assert_close(more.to_dense(), more.grads.mT @ more.inputs, **ALGEBRA)


@pytest.mark.parametrize("sides", [("A",), ("G",), ("A", "G")])
def test_diagonal_sides_are_given_as_vectors(sides):
    full = {"A": torch.diag(spd(IN).diagonal()), "G": torch.diag(spd(OUT, seed=1).diagonal())}
    given = {name: M.diagonal() if name in sides else M for name, M in full.items()}
    product, V = KroneckerProduct(**given), normal(OUT, IN, seed=2)
    factors = OuterProduct(normal(1, OUT, seed=2), normal(1, IN, seed=3))
    expected = dense.kron(full["A"], full["G"])
    assert_close(product.to_dense(), expected, **ALGEBRA)
    assert_close(dense.vec(product.mv(V)), expected @ dense.vec(V), **ALGEBRA)
    assert_close(product.mv(factors), product.mv(factors.to_dense()), **ALGEBRA)
