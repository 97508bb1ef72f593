"""Every block against the dense second moment of the examples' gradients."""

import pytest
import torch
from torch.testing import assert_close

from kronfac.curvature import (
    BlockDiagonalInverse,
    Curvature,
    DenseBlock,
    DiagonalBlock,
    DiagonalMoments,
    ExactTikhonov,
    FactoredTikhonov,
    KroneckerBlock,
    KroneckerMoments,
    SampledFisher,
    SummedGradient,
    Tap,
)
from kronfac.curvature.estimate import Sample
from kronfac.curvature.estimate import estimate as estimate_all
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.linalg import OuterProduct
from kronfac.storage import pack, unpack
from tests.conformance import CHECKS, Case
from tests.conftest import ALGEBRA, normal, seeded, spd
from tests.curvature.test_curvature import Part
from tests.reference import dense

ROWS, COLUMNS = 2, 3
EXAMPLES = 5
GAMMA = 0.3


def taps(*places: int, seed: int = 0) -> list[Tap]:
    """One use for each number of places."""
    return [
        Tap(
            normal(EXAMPLES, n, COLUMNS, seed=seed + 10 * i),
            normal(EXAMPLES, n, ROWS, seed=seed + 10 * i + 1),
        )
        for i, n in enumerate(places)
    ]


def gradients(uses: list[Tap]) -> list[torch.Tensor]:
    """vec(Σ_uses Σ_places g āᵀ) of every example, one product at a time."""
    found = []
    for n in range(EXAMPLES):
        total = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
        for tap in uses:
            for g, a in zip(tap.grads[n], tap.inputs[n], strict=True):
                total += torch.outer(g, a)
        found.append(dense.vec(total))
    return found


def second_moment(uses: list[Tap]) -> torch.Tensor:
    return sum(torch.outer(v, v) for v in gradients(uses))


each_use = pytest.mark.parametrize("places", [(1,), (3,), (1, 1), (2, 4)], ids=str)


def estimate(block, *parts, old=None, decay=0.0, weight=0.7):
    average = block.average(old, decay)
    for uses in parts:
        average.add(uses, 1.0, weight)
    return average.value()


# ------------------------------------------------------------------------------------------ moments


@each_use
def test_a_dense_block_is_the_second_moment_of_the_gradients(places):
    uses = taps(*places)
    assert_close(DenseBlock().observe(uses, 0.7).dense(), 0.7 * second_moment(uses), **ALGEBRA)


@each_use
def test_a_diagonal_block_is_its_diagonal(places):
    uses = taps(*places)
    moments = DiagonalBlock().observe(uses, 0.7)
    expected = 0.7 * second_moment(uses).diagonal()
    assert_close(dense.vec(moments.D), expected, **ALGEBRA)
    assert_close(moments.dense(), torch.diag(expected), **ALGEBRA)


@each_use
def test_expand_takes_every_place_for_an_example(places):
    """A is a mean over all places of all examples; G is their sum, not divided by the places."""
    uses = taps(*places)
    a = [x for tap in uses for n in range(EXAMPLES) for x in tap.inputs[n]]
    g = [x for tap in uses for n in range(EXAMPLES) for x in tap.grads[n]]
    moments = KroneckerBlock("expand").observe(uses, 0.7)
    assert len(a) == EXAMPLES * sum(places)
    assert_close(moments.A, sum(torch.outer(x, x) for x in a) / len(a), **ALGEBRA)
    assert_close(moments.G, 0.7 * sum(torch.outer(x, x) for x in g), **ALGEBRA)


@each_use
def test_reduce_takes_the_places_of_an_example_together(places):
    """A from the mean of an example's ā, G from the sum of its g."""
    uses = taps(*places)
    a = [torch.cat([tap.inputs[n] for tap in uses]).mean(dim=0) for n in range(EXAMPLES)]
    g = [torch.cat([tap.grads[n] for tap in uses]).sum(dim=0) for n in range(EXAMPLES)]
    moments = KroneckerBlock("reduce").observe(uses, 0.7)
    assert_close(moments.A, sum(torch.outer(x, x) for x in a) / EXAMPLES, **ALGEBRA)
    assert_close(moments.G, 0.7 * sum(torch.outer(x, x) for x in g), **ALGEBRA)


def test_with_one_place_both_are_the_same():
    uses = taps(1)
    expand, reduce = (KroneckerBlock(s).observe(uses, 0.7) for s in ("expand", "reduce"))
    assert_close(expand.dense(), reduce.dense(), **ALGEBRA)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("places", [(1,), (3,), (2, 2)], ids=str)
def test_factors_are_exact_where_inputs_and_gradients_do_not_vary(places, sharing):
    """With the same ā and g at all places, reduce is exact; expand too, but for places that add up."""
    a, g = normal(COLUMNS), normal(ROWS, seed=1)
    uses = [Tap(a.expand(EXAMPLES, n, -1), g.expand(EXAMPLES, n, -1)) for n in places]
    found = KroneckerBlock(sharing).observe(uses, 1.0).dense()
    count = sum(places)
    together = second_moment(uses)  # (count g āᵀ)² of every example
    assert_close(found, together if sharing == "reduce" else together / count, **ALGEBRA)


@pytest.mark.parametrize("side", ["diagonal_inputs", "diagonal_grads"])
def test_a_side_may_be_kept_as_its_diagonal(side):
    uses = taps(2, 1)
    whole = KroneckerBlock().observe(uses, 0.7)
    old = KroneckerBlock(**{side: True}).observe(taps(2, 1, seed=50), 0.7)
    block = KroneckerBlock(**{side: True})
    moments = block.observe(uses, 0.7)
    diagonal, full = ("A", "G") if side == "diagonal_inputs" else ("G", "A")
    assert_close(getattr(moments, diagonal), getattr(whole, diagonal).diagonal(), **ALGEBRA)
    assert torch.equal(getattr(moments, full), getattr(whole, full))
    assert moments.size == whole.size
    assert_close(moments.trace(), moments.dense().trace(), **ALGEBRA)
    mixed = estimate(block, uses, old=old, decay=0.9)
    for name in ("A", "G"):
        expected = 0.9 * getattr(old, name) + 0.1 * getattr(moments, name)
        assert_close(getattr(mixed, name), expected, **ALGEBRA)


def test_a_gradient_whose_uses_are_not_seen_is_squared():
    V = normal(ROWS, COLUMNS)
    assert_close(DiagonalBlock().observe(SummedGradient(V), 0.7).D, 0.7 * V**2, **ALGEBRA)
    M = DenseBlock().observe(SummedGradient(V), 0.7).dense()
    assert_close(M, 0.7 * torch.outer(dense.vec(V), dense.vec(V)), **ALGEBRA)


def test_the_square_of_the_summed_gradient_is_unbiased():
    """Gradients of independent examples with mean zero: 4000 draws, within five standard errors."""
    scales = normal(EXAMPLES, ROWS, COLUMNS).abs()
    signs = torch.randint(2, (4000, EXAMPLES, 1, 1), generator=torch.Generator().manual_seed(2))
    summed = ((2 * signs - 1) * scales).sum(dim=1)
    found = torch.stack([DiagonalBlock().observe(SummedGradient(V), 1.0).D for V in summed])
    error = found.std(dim=0) / 4000**0.5
    assert ((found.mean(dim=0) - scales.square().sum(dim=0)).abs() < 5 * error).all()


BLOCKS = {
    "expand": KroneckerBlock(),
    "reduce": KroneckerBlock("reduce"),
    "diagonal A": KroneckerBlock(diagonal_inputs=True),
    "diagonal A and G": KroneckerBlock(diagonal_inputs=True, diagonal_grads=True),
    "diagonal": DiagonalBlock(),
    "dense": DenseBlock(),
}
each_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)


def values(moments) -> list[torch.Tensor]:
    return [v for v in pack(moments).values() if isinstance(v, torch.Tensor)]


@each_block
def test_moments_of_several_passes_are_averaged_into_the_old_ones(block):
    old = estimate(block, taps(2, seed=50))
    kept = [M.clone() for M in values(old)]
    parts = [taps(2), taps(2, seed=70)]
    new = estimate(block, *parts)
    averaged = estimate(block, *parts, old=old, decay=0.9)
    for found, a, b in zip(values(averaged), kept, values(new), strict=True):
        assert_close(found, 0.9 * a + 0.1 * b, **ALGEBRA)
    assert all(torch.equal(a, b) for a, b in zip(values(old), kept, strict=True))


@each_block
def test_several_backward_passes_share_one_forward_pass(block):
    """Inputs count once, gradients each time."""
    uses = taps(2)
    once, twice = block.average(None, 0.0), block.average(None, 0.0)
    once.add(uses, 1.0, 0.7)
    twice.add(uses, 1.0, 0.35)
    twice.add(uses, 0.0, 0.35)
    for a, b in zip(values(once.value()), values(twice.value()), strict=True):
        assert_close(a, b, **ALGEBRA)


@each_block
def test_what_moments_say_of_themselves(block):
    moments = estimate(block, taps(2))
    matrix = moments.dense()
    assert moments.size == len(matrix) == ROWS * COLUMNS
    assert_close(moments.trace(), matrix.trace(), **ALGEBRA)
    assert moments.trace().dtype == torch.float64
    assert torch.linalg.eigvalsh(matrix)[0] > -1e-12
    assert all(bool(number.isfinite()) for number in moments.probe())
    again = unpack(pack(moments))
    assert type(again) is type(moments)
    assert all(torch.equal(a, b) for a, b in zip(values(again), values(moments), strict=True))


@each_block
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_probe_finds_what_is_not_finite(block, bad):
    uses = taps(2)
    uses[0].grads[1, 0, 1] = bad
    moments = estimate(block, uses)
    assert not all(bool(number.isfinite()) for number in moments.probe())


# ------------------------------------------------------------------------------------------ inverses


def damped_truth(moments, tikhonov):
    if isinstance(moments, KroneckerMoments) and isinstance(tikhonov, FactoredTikhonov):
        A, G = (torch.diag(M) if M.dim() == 1 else M for M in (moments.A, moments.G))
        damped_A, damped_G = dense.factored_tikhonov([[A]], [[G]], GAMMA, tikhonov.norm)
        return dense.kron(damped_A[0][0], damped_G[0][0])
    matrix = moments.dense()
    return matrix + GAMMA**2 * torch.eye(len(matrix)).double()


def cases():
    for name, block in BLOCKS.items():
        for tikhonov in (FactoredTikhonov(), FactoredTikhonov("frobenius"), ExactTikhonov()):
            moments = estimate(block, taps(2, 1))

            def alone(moments=moments, tikhonov=tikhonov):
                operator = moments.damped(GAMMA, tikhonov)
                return lambda V: (operator.mv(V[0]),)

            def in_company(moments=moments, tikhonov=tikhonov):
                prepared = BlockDiagonalInverse(tikhonov).prepare(Curvature((moments,)))
                return unpack(pack(prepared.damped(GAMMA))).mv

            def truth(moments=moments, tikhonov=tikhonov):
                return damped_truth(moments, tikhonov)

            for way, build in (("alone", alone), ("loaded", in_company)):
                yield Case(f"{name}-{tikhonov}-{way}", build, truth, [(ROWS, COLUMNS)])


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_conformance(case, check):
    check(case)


@each_block
@pytest.mark.parametrize("tikhonov", [FactoredTikhonov(), ExactTikhonov()], ids=str)
def test_the_operator_is_its_matrix_and_makes_new_tensors(block, tikhonov):
    moments = estimate(block, taps(2, 1))
    operator = moments.damped(GAMMA, tikhonov)
    V = normal(ROWS, COLUMNS, seed=9)
    kept = V.clone()
    U = operator.mv(V)
    assert_close(dense.vec(U), operator.to_dense() @ dense.vec(V), **ALGEBRA)
    U.zero_()
    assert torch.equal(V, kept)
    assert bool(operator.mv(V).any())


@each_block
def test_a_gradient_may_be_given_as_an_outer_product(block):
    """Blocks that have no use for its factors get it dense."""
    moments = estimate(block, taps(2, 1))
    damped = BlockDiagonalInverse().prepare(Curvature((moments,))).damped(GAMMA)
    product = OuterProduct(normal(1, ROWS), normal(1, COLUMNS, seed=1))
    assert_close(damped.mv([product])[0], damped.mv([product.to_dense()])[0], **ALGEBRA)


@each_block
def test_without_curvature_and_damping_there_is_no_inverse(block):
    zeros = [Tap(torch.zeros(2, 1, COLUMNS).double(), torch.zeros(2, 1, ROWS).double())]
    moments = estimate(block, zeros)
    with pytest.raises((NonFiniteError, NotPositiveDefiniteError)):
        moments.damped(0.0, FactoredTikhonov("one"))
    damped = BlockDiagonalInverse(FactoredTikhonov("one")).prepare(Curvature((moments,)))
    assert [number for number, _ in damped.damped(0.0).failures] == [0]


def test_blocks_of_several_kinds_side_by_side():
    kinds = [KroneckerMoments(spd(3), spd(2)), DiagonalMoments(normal(2, 4).square())]
    curvature = Curvature((*kinds, estimate(DenseBlock(), taps(2))))
    damped = BlockDiagonalInverse().prepare(curvature).damped(GAMMA)
    shapes = [(2, 3), (2, 4), (ROWS, COLUMNS)]
    vectors = [normal(*shape, seed=i) for i, shape in enumerate(shapes)]
    for found, moments, V in zip(damped.mv(vectors), curvature.blocks, vectors, strict=True):
        expected = torch.linalg.solve(damped_truth(moments, FactoredTikhonov()), dense.vec(V))
        assert_close(dense.vec(found), expected, **ALGEBRA)


def test_a_change_of_block_starts_the_average_anew():
    """A unit that fell back to a diagonal block has no use for its Kronecker factors."""
    part = Part([normal(4, COLUMNS)], [normal(4, ROWS, seed=1)])
    old = Curvature((KroneckerMoments(spd(COLUMNS), spd(ROWS)),), examples=4.0)

    def found(block, old):
        sample = Sample([part], lambda part: part)
        return estimate_all(sample, [block], SampledFisher(), seeded(), old=old, decay=0.9)

    fresh = found(DiagonalBlock(), None).blocks[0]
    assert torch.equal(found(DiagonalBlock(), old).blocks[0].D, fresh.D)
    assert not torch.allclose(
        found(KroneckerBlock(), old).blocks[0].A, found(KroneckerBlock(), None).blocks[0].A
    )


def test_settings_are_checked():
    with pytest.raises(ValueError, match="sharing is one of"):
        KroneckerBlock("mean")
