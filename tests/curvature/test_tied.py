"""The sum of two Kronecker products against its dense definition."""

from itertools import product

import pytest
import torch
from torch.testing import assert_close

from kronfac.curvature import (
    BlockDiagonalInverse,
    Curvature,
    ExactTikhonov,
    FactoredTikhonov,
    KroneckerBlock,
    KroneckerMoments,
    KroneckerSumBlock,
    KroneckerSumMoments,
    OneHot,
    Tap,
)
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError, StateError
from kronfac.storage import Layout, pack, unpack
from kronfac.testing import check_block
from tests.conformance import assert_relative
from tests.conftest import ALGEBRA, normal, spd
from tests.reference import dense

ROWS, COLUMNS, EXAMPLES, PLACES = 4, 3, 5, 2
GAMMA = 0.3
SIDES = list(product([False, True], repeat=4))
each_side = pytest.mark.parametrize("sides", SIDES, ids=str)


def block_of(sides: tuple[bool, ...], sharing: str = "expand") -> KroneckerSumBlock:
    return KroneckerSumBlock(
        KroneckerBlock(sharing, *sides[:2]), KroneckerBlock(sharing, *sides[2:])
    )


def direct(seed: int = 0, places: int = PLACES) -> Tap:
    return Tap(
        normal(EXAMPLES, places, COLUMNS, seed=seed), normal(EXAMPLES, places, ROWS, seed=seed + 1)
    )


def transposed(seed: int = 2, places: int = PLACES) -> Tap:
    inputs = normal(EXAMPLES, places, ROWS, seed=seed)
    grads = normal(EXAMPLES, places, COLUMNS, seed=seed + 1)
    return Tap(inputs, grads, transposed=True)


def second_moment(x: torch.Tensor, diagonal: bool) -> torch.Tensor:
    """Σ x xᵀ over all vectors, one at a time; of which only the diagonal may be kept."""
    total = sum(torch.outer(v, v) for v in x.reshape(-1, x.shape[-1]))
    return torch.diag(total.diagonal()) if diagonal else total


def factors(uses: list[Tap], sides: tuple[bool, ...], weight: float) -> list[list[torch.Tensor]]:
    """[[A₁, G₁], [A₂, G₂]] by their definition."""
    pairs = []
    for way in (False, True):
        part = [tap for tap in uses if tap.transposed == way]
        a = torch.cat([tap.dense_inputs() for tap in part], dim=1)
        g = torch.cat([tap.grads for tap in part], dim=1)
        on_columns, on_rows = sides[2 * way : 2 * way + 2]
        vectors = a.shape[0] * a.shape[1]
        if way:
            pairs.append(
                [weight * second_moment(g, on_columns), second_moment(a, on_rows) / vectors]
            )
        else:
            pairs.append(
                [second_moment(a, on_columns) / vectors, weight * second_moment(g, on_rows)]
            )
    return pairs


def damped_truth(pairs, gamma: float, norm: str = "trace") -> torch.Tensor:
    """Σₖ (Aₖ + πₖγₖI) ⊗ (Gₖ + γₖ/πₖ I) with γₖ² in proportion to the size of Aₖ ⊗ Gₖ."""

    def size(M: torch.Tensor) -> float:
        if norm == "frobenius":
            return float(M.square().sum().sqrt() / len(M) ** 0.5)
        if norm == "spectral":
            return float(torch.linalg.eigvalsh(M)[-1])
        return float(M.trace() / len(M))

    total = 0
    all_sizes = sum(size(A) * size(G) for A, G in pairs)
    for A, G in pairs:
        part = gamma * (size(A) * size(G) / all_sizes) ** 0.5
        damped_A, damped_G = dense.factored_tikhonov([[A]], [[G]], part, norm)
        total = total + dense.kron(damped_A[0][0], damped_G[0][0])
    return total


@each_side
def test_it_conforms(sides):
    check_block(block_of(sides), uses=("direct", "transposed"))
    check_block(block_of(sides), uses=("direct", "transposed", "transposed", "direct"))


@pytest.mark.parametrize("way", ["direct", "transposed"])
def test_it_conforms_if_one_direction_is_not_used(way):
    check_block(KroneckerSumBlock(), uses=(way,))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_it_conforms_in_both_settings(sharing):
    check_block(block_of((False,) * 4, sharing), uses=("direct", "transposed"))


@each_side
def test_moments_are_the_sum_of_both_products(sides):
    uses = [direct(), transposed(), direct(seed=7, places=1)]
    moments = block_of(sides).observe(uses, 0.7)
    pairs = factors(uses, sides, 0.7)
    expected = sum(dense.kron(A, G) for A, G in pairs)
    assert_close(moments.dense(), expected, **ALGEBRA)
    assert_close(moments.trace(), expected.trace(), **ALGEBRA)
    assert moments.size == ROWS * COLUMNS


@each_side
@pytest.mark.parametrize("norm", ["trace", "frobenius", "spectral", "one"])
def test_the_operator_is_the_inverse_of_the_damped_sum(sides, norm):
    uses = [direct(), transposed()]
    moments = block_of(sides).observe(uses, 0.7)
    expected = torch.linalg.inv(damped_truth(factors(uses, sides, 0.7), GAMMA, norm))
    operator = moments.damped(GAMMA, FactoredTikhonov(norm))
    assert_relative(operator.to_dense(), expected)
    V = normal(ROWS, COLUMNS, seed=9)
    assert_relative(dense.vec(operator.mv(V)), expected @ dense.vec(V))
    prepared = BlockDiagonalInverse(FactoredTikhonov(norm)).prepare(Curvature((moments,)))
    loaded = unpack(pack(prepared.damped(GAMMA)))
    assert torch.equal(loaded.mv([V])[0], operator.mv(V))


def test_the_larger_product_may_be_either():
    """Which of the two is decomposed first does not change the matrix."""
    uses = [direct(), transposed()]
    for weight in (1e-6, 1e6):
        moments = KroneckerSumBlock().observe(uses, weight)
        scaled = KroneckerSumMoments(
            moments.direct, KroneckerMoments(moments.transposed.A / weight**2, moments.transposed.G)
        )
        pairs = [[m.A, m.G] for m in (scaled.direct, scaled.transposed)]
        expected = torch.linalg.inv(damped_truth(pairs, GAMMA))
        assert_relative(scaled.damped(GAMMA, FactoredTikhonov()).to_dense(), expected)


def test_the_exact_form_is_replaced_by_the_factored_one():
    moments = KroneckerSumBlock().observe([direct(), transposed()], 0.7)
    found = moments.damped(GAMMA, ExactTikhonov()).to_dense()
    assert torch.equal(found, moments.damped(GAMMA, FactoredTikhonov()).to_dense())


@pytest.mark.parametrize("way", ["direct", "transposed"])
def test_with_one_product_it_is_a_kronecker_block(way):
    uses = [direct() if way == "direct" else transposed()]
    V = normal(ROWS, COLUMNS, seed=9)
    both = KroneckerSumBlock().observe(uses, 0.7)
    alone = KroneckerBlock().observe(uses, 0.7)
    assert_close(both.dense(), alone.dense(), **ALGEBRA)
    found, expected = (m.damped(GAMMA, FactoredTikhonov()).mv(V) for m in (both, alone))
    assert_close(found, expected, **ALGEBRA)


def test_what_is_added_beside_the_cross_terms_is_gamma_squared():
    """Σ γₖ² = γ², and every factor gets the same share of its mean eigenvalue."""
    A = [spd(COLUMNS), 5 * spd(COLUMNS, seed=1)]
    G = [0.1 * spd(ROWS, seed=2), 3 * spd(ROWS, seed=3)]
    moments = KroneckerSumMoments(*map(KroneckerMoments, A, G))
    found = torch.linalg.inv(moments.damped(GAMMA, FactoredTikhonov()).to_dense())
    sizes = [float(M.trace() / len(M)) for M in (*A, *G)]
    share = GAMMA / (sizes[0] * sizes[2] + sizes[1] * sizes[3]) ** 0.5
    damped = [
        M + share * size * torch.eye(len(M), dtype=M.dtype)
        for M, size in zip((*A, *G), sizes, strict=True)
    ]
    expected = dense.kron(damped[0], damped[2]) + dense.kron(damped[1], damped[3])
    assert_close(found, expected, rtol=1e-9, atol=1e-10)
    added = share**2 * (sizes[0] * sizes[2] + sizes[1] * sizes[3])
    assert added == pytest.approx(GAMMA**2)


def test_lookups_are_counted_and_never_vocabulary_squared():
    vocabulary, width = 50_000, 8
    index = torch.randint(vocabulary, (EXAMPLES, PLACES))
    hot = OneHot(index, vocabulary, torch.float64)
    uses = [
        Tap(hot, normal(EXAMPLES, PLACES, width), transposed=True),
        Tap(normal(EXAMPLES, PLACES, width), normal(EXAMPLES, PLACES, vocabulary, seed=1)),
    ]
    block = block_of((False, True, False, True))
    moments = block.observe(uses, 0.7)
    counts = torch.bincount(index.flatten(), minlength=vocabulary).double() / index.numel()
    assert_close(moments.transposed.G, counts, **ALGEBRA)
    assert moments.direct.G.shape == (vocabulary,)
    V = normal(vocabulary, width)
    U = moments.damped(GAMMA, FactoredTikhonov()).mv(V)
    assert U.shape == V.shape
    row = int(index[0, 0])
    pairs = [
        (m.A, m.G, FactoredTikhonov().sizes(m.A, m.G)) for m in (moments.direct, moments.transposed)
    ]
    total = sum(float(a * g) for _, _, (a, g) in pairs)
    matrix = sum(
        (A + GAMMA / total**0.5 * a * torch.eye(width).double()) * (G[row] + GAMMA / total**0.5 * g)
        for A, G, (a, g) in pairs
    )
    assert_close(U[row], torch.linalg.solve(matrix, V[row]), **ALGEBRA)


def test_several_backward_passes_share_one_forward_pass():
    uses = [direct(), transposed()]
    once, twice = (KroneckerSumBlock().average(None, 0.0) for _ in range(2))
    once.add(uses, 1.0, 0.7)
    twice.add(uses, 1.0, 0.35)
    twice.add(uses, 0.0, 0.35)
    assert_close(once.value().dense(), twice.value().dense(), **ALGEBRA)


def test_the_sampling_error_is_that_of_both_products():
    moments = KroneckerSumBlock().observe([direct(), transposed()], 0.7)
    alone = [Curvature((m,), examples=7.0) for m in (moments.direct, moments.transposed)]
    found = Curvature((moments,), examples=7.0).sampling_error()
    assert found == pytest.approx(sum(curvature.sampling_error() for curvature in alone))
    assert found == pytest.approx(float(moments.trace()) / 49)


def test_a_diagonal_side_has_the_sampling_error_of_single_numbers():
    whole = KroneckerMoments(spd(COLUMNS), spd(ROWS))
    wide = KroneckerMoments(whole.A, whole.G.diagonal())
    errors = [Curvature((m,), examples=7.0).sampling_error() for m in (whole, wide)]
    assert errors[1] == pytest.approx(errors[0] / ROWS)


def test_without_curvature_and_damping_there_is_no_inverse():
    zeros = [
        Tap(torch.zeros(2, 1, COLUMNS).double(), torch.zeros(2, 1, ROWS).double()),
        Tap(torch.zeros(2, 1, ROWS).double(), torch.zeros(2, 1, COLUMNS).double(), transposed=True),
    ]
    moments = KroneckerSumBlock().observe(zeros, 1.0)
    with pytest.raises((NonFiniteError, NotPositiveDefiniteError)):
        moments.damped(0.0, FactoredTikhonov("one"))
    assert bool(moments.damped(0.5, FactoredTikhonov()).mv(normal(ROWS, COLUMNS)).isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("tap", [0, 1])
def test_a_probe_finds_what_is_not_finite(bad, tap):
    uses = [direct(), transposed()]
    uses[tap].grads[1, 0, 1] = bad
    moments = KroneckerSumBlock().observe(uses, 0.7)
    assert not all(bool(number.isfinite()) for number in moments.probe())
    with pytest.raises((NonFiniteError, NotPositiveDefiniteError)):
        moments.damped(GAMMA, FactoredTikhonov())


def test_a_state_of_another_shape_is_refused():
    moments = KroneckerSumBlock().observe([direct(), transposed()], 0.7)
    moments.check(Layout("unit", ROWS, COLUMNS, torch.float64))
    with pytest.raises(StateError, match="unit"):
        moments.check(Layout("unit", COLUMNS, ROWS, torch.float64))
    with pytest.raises(StateError, match="dtype"):
        moments.check(Layout("unit", ROWS, COLUMNS, torch.float32))
