"""F̂⁻¹: its definition, and float32 with the rank-deficient statistics of a first mini-batch."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from kronfac.curvature import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    Curvature,
    DiagonalMoments,
    ExactTikhonov,
    KroneckerMoments,
    Link,
    SampledFisher,
)
from kronfac.curvature.inverse import DampedInverse, Failed
from kronfac.objective import Bernoulli
from tests.conformance import as_matrix, assert_relative
from tests.conftest import ALGEBRA, mlp, normal, seeded
from tests.curvature.problems import curvature_from, network
from tests.curvature.test_estimate import curvature_of
from tests.reference import dense

GAMMA = 0.2


def test_uncorrelated_layers_are_block_diagonal():
    A, G, shapes = network("deep")
    plain = curvature_from(A, G)
    links = (Link(torch.zeros_like(k.A_next), torch.zeros_like(k.G_next)) for k in plain.links)
    apart = replace(plain, links=tuple(links))
    tridiagonal = BlockTridiagonalInverse().prepare(apart).damped(GAMMA)
    diagonal = BlockDiagonalInverse().prepare(plain).damped(GAMMA)
    assert_relative(as_matrix(tridiagonal.mv, shapes), as_matrix(diagonal.mv, shapes))


def test_xi_is_the_matrix_of_the_paper_and_its_transpose():
    A, G, shapes = network("deep")
    (chain,) = BlockTridiagonalInverse().prepare(curvature_from(A, G)).damped(GAMMA).pieces
    A, G = dense.factored_tikhonov(A, G, GAMMA)
    tilde = dense.kron_blocks(A, G)
    sizes = [len(tilde[i][i]) for i in range(len(tilde))]
    blocks = [
        [
            torch.eye(a).double() if i == j else torch.zeros(a, b).double()
            for j, b in enumerate(sizes)
        ]
        for i, a in enumerate(sizes)
    ]
    for i in range(len(sizes) - 1):
        blocks[i][i + 1] = -tilde[i][i + 1] @ tilde[i + 1][i + 1].inverse()
    Xi = dense.assemble(blocks)
    assert_close(as_matrix(chain.Xi, shapes), Xi, **ALGEBRA)
    assert_close(as_matrix(chain.Xi_transposed, shapes), Xi.mT, **ALGEBRA)


# ------------------------------------------------------------------------- float32, rank-deficient

WIDTHS = [784, 1000, 500, 250, 30]
CASES = 125


@functools.cache
def image_statistics() -> Curvature:
    """One mini-batch of 125 sparse non-negative 'images': every factor but the last G is singular."""
    model = mlp(WIDTHS, "sigmoid", dtype=torch.float32)
    x = 5 * (torch.rand(CASES, WIDTHS[0], generator=seeded(3)) - 0.8).clamp(min=0)
    return curvature_of(model, Bernoulli(), x, SampledFisher(), generator=seeded(4))


def in_float64(curvature: Curvature) -> Curvature:
    return Curvature(
        tuple(KroneckerMoments(b.A.double(), b.G.double()) for b in curvature.blocks),
        tuple(Link(k.A_next.double(), k.G_next.double()) for k in curvature.links),
    )


def vector(seed: int) -> tuple[torch.Tensor, ...]:
    return tuple(
        normal(len(b.G), len(b.A), seed=seed, dtype=torch.float32)
        for b in image_statistics().blocks
    )


@functools.cache
def truth(gamma: float):
    damped = BlockTridiagonalInverse().prepare(in_float64(image_statistics())).damped(gamma)
    return damped.mv([V.double() for V in vector(0)])


@pytest.mark.parametrize(("gamma", "close"), [(1.0, True), (1e-5**0.5, True), (1e-4, False)])
def test_float32_with_rank_deficient_statistics(gamma, close):
    """λ₀ = 1, the paper's η = 1e-5 as γ², the floor of `GammaSearch`: finite and positive.

    At the first two it is also close to the float64 inverse.
    """
    curvature = image_statistics()
    assert torch.linalg.matrix_rank(curvature.blocks[0].A) <= CASES
    damped = BlockTridiagonalInverse().prepare(curvature).damped(gamma)
    for seed in range(3):
        V = vector(seed)
        U = damped.mv(V)
        assert all(u.isfinite().all() for u in U)
        assert sum((u.double() * v.double()).sum() for u, v in zip(U, V, strict=True)) > 0
        for u, expected in zip(U, truth(gamma), strict=True) if close and seed == 0 else ():
            assert (u - expected).norm() < 1e-2 * expected.norm()


# ------------------------------------------------------------------------------- units outside chains


def test_units_without_a_link_are_inverted_by_themselves():
    """The chain 0–1, then 2 alone, and a diagonal block: three inverses side by side."""
    A, G, shapes = network("deep")
    whole = curvature_from(A, G)
    D = normal(2, 3, seed=4).square()
    split = Curvature(
        (*whole.blocks[:3], DiagonalMoments(D)), (whole.links[0], None, None), whole.examples
    )
    damped = BlockTridiagonalInverse().prepare(split).damped(GAMMA)
    assert [getattr(piece, "length", 1) for piece in damped.pieces] == [2, 1, 1]
    damped_A, damped_G = dense.factored_tikhonov(A, G, GAMMA)
    chain = dense.kron_fisher(*([row[:2] for row in M[:2]] for M in (damped_A, damped_G)))
    alone = dense.kron(damped_A[2][2], damped_G[2][2])
    diagonal = torch.diag(dense.vec(D) + GAMMA**2)
    expected = torch.block_diag(chain, alone, diagonal).inverse()
    assert_relative(as_matrix(damped.mv, [*shapes[:3], (2, 3)]), expected)


def test_a_chain_that_has_no_inverse_falls_back_to_its_units():
    A, G, shapes = network("two_layers")
    plain = curvature_from(A, G)
    (link,) = plain.links
    bad = replace(plain, links=(Link(torch.full_like(link.A_next, torch.nan), link.G_next),))
    damped = BlockTridiagonalInverse().prepare(bad).damped(GAMMA)
    assert not damped.failures
    alone = BlockDiagonalInverse().prepare(plain).damped(GAMMA)
    assert_relative(as_matrix(damped.mv, shapes), as_matrix(alone.mv, shapes))


def without(curvature, number):
    """The same with NaN in one unit's A."""
    blocks = list(curvature.blocks)
    blocks[number] = replace(blocks[number], A=torch.full_like(blocks[number].A, torch.nan))
    return replace(curvature, blocks=tuple(blocks))


@pytest.mark.parametrize("bad", range(4))
def test_a_unit_without_an_inverse_divides_its_chain_in_two(bad):
    A, G, shapes = network("deep")
    strategy = BlockTridiagonalInverse()
    damped = strategy.prepare(without(curvature_from(A, G), bad)).damped(GAMMA)
    ((number, message),) = damped.failures
    assert number == bad
    assert "NaN" in message
    # What is left: F̂⁻¹ of the units before and of those behind it.
    damped_A, damped_G = dense.factored_tikhonov(A, G, GAMMA)
    parts = [
        dense.block_tridiagonal_inverse_upwards(
            *([row[start:stop] for row in M[start:stop]] for M in (damped_A, damped_G))
        )
        for start, stop in ((0, bad), (bad + 1, 4))
        if start < stop
    ]
    pieces = tuple(piece for piece in damped.pieces if not isinstance(piece, Failed))
    rest = [shape for i, shape in enumerate(shapes) if i != bad]
    found = as_matrix(DampedInverse(pieces).mv, rest)
    assert_relative(found, torch.block_diag(*parts))


@pytest.mark.parametrize("bad", range(4))
def test_a_unit_without_an_inverse_keeps_its_place_in_the_old_chain(bad):
    """Its old Σ⁻¹, the block of Λ: what is left of Ξᵀ Λ Ξ if the unit's Ψ are left out."""
    A, G, shapes = network("deep")
    strategy = BlockTridiagonalInverse()
    whole = curvature_from(A, G)
    old = strategy.prepare(whole).damped(2 * GAMMA)
    new = strategy.prepare(without(whole, bad)).damped(GAMMA)
    completed = new.completed_by(old)
    assert not completed.failures
    (chain,) = old.pieces
    n = sum(getattr(piece, "length", 1) for piece in completed.pieces[: min(bad, 1)])
    assert n == bad
    assert completed.pieces[min(bad, 1)] is chain.Sigma_inv[bad]
    assert torch.linalg.eigvalsh(as_matrix(completed.mv, shapes)).min() > 0
    # Of an inverse in pieces, the piece is kept that the unit has; next time the chain is whole again.
    again = strategy.prepare(without(whole, bad)).damped(3 * GAMMA).completed_by(completed)
    assert again.pieces[min(bad, 1)] is chain.Sigma_inv[bad]
    assert new.completed_by(new) is None
    assert new.completed_by(None) is None


def test_sigma_in_the_old_chain_is_a_conditional_covariance():
    """Σᵢ = F̂ᵢᵢ − F̂ᵢ,ᵢ₊₁ F̂ᵢ₊₁,ᵢ₊₁⁻¹ F̂ᵢ₊₁,ᵢ: not above the unit's own curvature F̂ᵢᵢ."""
    A, G, shapes = network("deep")
    (chain,) = BlockTridiagonalInverse().prepare(curvature_from(A, G)).damped(GAMMA).pieces
    F = dense.kron_fisher(*dense.factored_tikhonov(A, G, GAMMA))
    sizes = [rows * columns for rows, columns in shapes]
    rows = [row.split(sizes, dim=1) for row in F.split(sizes)]
    for i, Sigma_inv in enumerate(chain.Sigma_inv[:-1]):
        cross = rows[i][i + 1]
        expected = rows[i][i] - cross @ torch.linalg.solve(rows[i + 1][i + 1], cross.mT)
        assert_relative(Sigma_inv.to_dense(), expected.inverse())


# ---------------------------------------------------------------------------------------- refusals


def test_settings_are_checked():
    with pytest.raises(ValueError, match="FactoredTikhonov only"):
        BlockTridiagonalInverse(ExactTikhonov())
