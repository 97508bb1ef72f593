"""How many numbers moments and inverses are sent as: of symmetric matrices one triangle."""

import torch

from kronfac.curvature import (
    DenseBlock,
    DiagonalBlock,
    FactoredTikhonov,
    InverseCost,
    KroneckerBlock,
    Moments,
    Tap,
)
from kronfac.curvature.grouped import GroupedKroneckerMoments
from kronfac.curvature.kronecker import KroneckerMoments
from kronfac.curvature.kronecker_sum import KroneckerSumMoments


def observed(block: KroneckerBlock | DenseBlock | DiagonalBlock) -> Moments:
    """Moments of V (3, 5) from one example."""
    return block.observe([Tap(torch.ones(1, 1, 5), torch.ones(1, 1, 3))], 1.0, 1.0)


def test_of_a_symmetric_matrix_one_triangle():
    assert observed(KroneckerBlock()).packed() == 5 * 6 / 2 + 3 * 4 / 2
    assert observed(KroneckerBlock(diagonal_inputs=True)).packed() == 5 + 3 * 4 / 2
    assert observed(DenseBlock()).packed() == 15 * 16 / 2


def test_a_square_diagonal_is_no_symmetric_matrix():
    square = DiagonalBlock().observe([Tap(torch.ones(1, 1, 4), torch.ones(1, 1, 4))], 1.0, 1.0)
    assert square.packed() == 16


def test_moments_of_several_matrices():
    factors = KroneckerMoments(torch.eye(5), torch.eye(3))
    assert KroneckerSumMoments(factors, factors).packed() == 2 * 21
    grouped = GroupedKroneckerMoments(torch.ones(2, 5, 5), torch.ones(2, 3, 3))
    assert grouped.packed() == 2 * 21


def test_an_inverse_is_sent_packed_if_it_is_symmetric():
    assert observed(KroneckerBlock()).inverse_cost(FactoredTikhonov()).sent == 21
    assert observed(DenseBlock()).inverse_cost(FactoredTikhonov()).sent == 120
    assert InverseCost(7, 0.0, 0.0).sent == 7
    assert (InverseCost(7, 0.0, 0.0) + InverseCost(9, 0.0, 0.0, 6)).sent == 13
