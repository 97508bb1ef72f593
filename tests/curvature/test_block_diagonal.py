import pytest
import torch
from torch.testing import assert_close

from kronfac.curvature import (
    BlockDiagonalInverse,
    Curvature,
    DenseBlock,
    DenseMoments,
    ExactTikhonov,
    FactoredTikhonov,
    KroneckerMoments,
    Tap,
)
from kronfac.curvature.inverse import Failed
from kronfac.linalg import OuterProduct
from tests.conftest import ALGEBRA, normal, psd, spd
from tests.reference import dense

SHAPES = [(6, 9), (4, 7)]  # (out, in+1)


def kronecker(*pairs) -> Curvature:
    return Curvature(tuple(KroneckerMoments(A, G) for A, G in pairs))


def curvature() -> Curvature:
    return kronecker(
        *((spd(d_in, seed=i), spd(d_out, seed=7 + i)) for i, (d_out, d_in) in enumerate(SHAPES))
    )


@pytest.mark.parametrize("tikhonov", [FactoredTikhonov(), ExactTikhonov()])
@pytest.mark.parametrize("examples", [1, 2, 3, 50])
def test_low_rank_route_equals_the_plain_one(examples, tikhonov):
    """F̆⁻¹𝒢ᵀ𝒜: from 1 example all layers take the short way, from 50 none, between some."""
    damped = BlockDiagonalInverse(tikhonov).prepare(curvature()).damped(0.3)
    factors = [
        OuterProduct(normal(examples, d_out, seed=i), normal(examples, d_in, seed=9 + i))
        for i, (d_out, d_in) in enumerate(SHAPES)
    ]
    gradient = tuple(product.grads.mT @ product.inputs for product in factors)
    for left, right in zip(damped.mv(factors), damped.mv(gradient), strict=True):
        assert_close(left, right, **ALGEBRA)


def test_singular_factors_without_damping_name_the_factor_and_leave_the_others():
    singular = kronecker((spd(3), spd(2)), (torch.zeros(4, 4), psd(3, 1)), (spd(4), spd(3)))
    strategy = BlockDiagonalInverse(FactoredTikhonov("one"))
    damped = strategy.prepare(singular).damped(0.0)
    ((number, message),) = damped.failures
    assert number == 1
    assert "A[1]" in message
    for i in (0, 2):
        block = singular.blocks[i]
        expected = dense.kron(block.A, block.G).inverse()
        assert_close(damped.pieces[i].to_dense(), expected, **ALGEBRA)


@pytest.mark.parametrize(
    "strategy", [BlockDiagonalInverse(), BlockDiagonalInverse(ExactTikhonov())]
)
def test_nan_in_the_statistics_concerns_its_block_alone(strategy):
    G = spd(3).clone()
    G[1, 1] = float("nan")
    bad = kronecker((spd(3), spd(2)), (spd(4), G))
    damped = strategy.prepare(bad).damped(0.3)
    assert [number for number, _ in damped.failures] == [1]
    good = strategy.prepare(kronecker((spd(3), spd(2)))).damped(0.3)
    assert torch.equal(damped.pieces[0].to_dense(), good.pieces[0].to_dense())


def test_an_inverse_is_completed_by_the_last_good_one():
    G = spd(3).clone()
    G[1, 1] = float("nan")
    good = kronecker((spd(3), spd(2)), (spd(4), spd(3)))
    strategy = BlockDiagonalInverse()
    old, new = (
        strategy.prepare(good).damped(0.3),
        strategy.prepare(kronecker((2 * spd(3), spd(2)), (spd(4), G))).damped(0.3),
    )
    completed = new.completed_by(old)
    assert completed.pieces == (new.pieces[0], old.pieces[1])
    assert not completed.failures
    assert old.completed_by(None) is old  # which lacks nothing
    assert new.completed_by(None) is None
    assert new.completed_by(new) is None
    assert isinstance(new.pieces[1], Failed)


def test_low_rank_needs_a_factored_inverse():
    with pytest.raises(ValueError, match="low_rank=True"):
        BlockDiagonalInverse(ExactTikhonov(), low_rank=True)


def test_a_vector_of_another_network_is_refused():
    damped = BlockDiagonalInverse().prepare(curvature()).damped(0.3)
    with pytest.raises(ValueError, match="2 units"):
        damped.mv([normal(6, 9)])
    with pytest.raises(ValueError, match="2 units"):
        damped.mv([normal(6, 9), normal(4, 7), normal(4, 7)])


def test_dense_blocks_are_inverted_together():
    """Several of equal and of other sizes, one in pieces, one without an inverse: each as it is alone."""
    taps = [
        [Tap(normal(9, 1, columns, seed=i), normal(9, 1, rows, seed=i + 10))]
        for i, (rows, columns) in enumerate([(4, 2), (4, 2), (3, 2), (6, 2), (4, 2)])
    ]
    blocks = [DenseBlock(limit=8).observe(uses, 0.5) for uses in taps]
    assert [len(block.M) for block in blocks] == [1, 1, 1, 2, 1]
    bad = DenseMoments(torch.full_like(blocks[4].M, torch.nan), 4, 2)
    damped = BlockDiagonalInverse().prepare(Curvature((*blocks[:4], bad))).damped(0.3)
    assert [number for number, _ in damped.failures] == [4]
    for piece, block in zip(damped.pieces[:4], blocks, strict=False):
        matrix = block.dense() + 0.09 * torch.eye(block.size, dtype=torch.float64)
        assert_close(piece.to_dense(), torch.linalg.inv(matrix), rtol=1e-9, atol=1e-10)
