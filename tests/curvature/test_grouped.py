"""A Kronecker product per group against the dense matrix that has them on its diagonal."""

import pytest
import torch
from torch.testing import assert_close

from kronfac.curvature import (
    BlockDiagonalInverse,
    Curvature,
    ExactTikhonov,
    FactoredTikhonov,
    GroupedKroneckerBlock,
    GroupedTap,
    KroneckerMoments,
)
from kronfac.errors import (
    NonFiniteError,
    NotPositiveDefiniteError,
    StateError,
    UnsupportedModelError,
)
from kronfac.storage import Layout, pack, unpack
from kronfac.testing import check_block
from tests.conformance import assert_relative
from tests.conftest import ALGEBRA, normal
from tests.reference import dense

GROUPS, EACH, COLUMNS, EXAMPLES, PLACES = 3, 2, 4, 5, 3
ROWS = GROUPS * EACH
GAMMA = 0.3


def tap(seed: int = 0, places: int = PLACES) -> GroupedTap:
    return GroupedTap(
        normal(GROUPS, EXAMPLES, places, COLUMNS, seed=seed),
        normal(GROUPS, EXAMPLES, places, EACH, seed=seed + 1),
    )


def factors(uses: list[GroupedTap], weight: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and G of every group, one vector at a time."""
    pairs = []
    for group in range(GROUPS):
        a = [x for use in uses for n in range(EXAMPLES) for x in use.inputs[group, n]]
        g = [x for use in uses for n in range(EXAMPLES) for x in use.grads[group, n]]
        pairs.append(
            (
                sum(torch.outer(x, x) for x in a) / len(a),
                weight * sum(torch.outer(x, x) for x in g),
            )
        )
    return pairs


def on_the_diagonal(pairs) -> torch.Tensor:
    """The matrix over vec(V) that has A ⊗ G of every group, entry by entry."""
    matrix = torch.zeros(COLUMNS, ROWS, COLUMNS, ROWS, dtype=torch.float64)
    for number, (A, G) in enumerate(pairs):
        part = slice(number * EACH, (number + 1) * EACH)
        matrix[:, part, :, part] = torch.einsum("ij,kl->ikjl", A, G)
    return matrix.reshape(ROWS * COLUMNS, ROWS * COLUMNS)


def test_it_conforms():
    check_block(GroupedKroneckerBlock(), uses=("grouped",))
    check_block(GroupedKroneckerBlock(), uses=("grouped", "grouped"))


def test_moments_are_a_product_per_group():
    uses = [tap(), tap(seed=7, places=1)]
    moments = GroupedKroneckerBlock().observe(uses, 0.7)
    expected = on_the_diagonal(factors(uses, 0.7))
    assert_close(moments.dense(), expected, **ALGEBRA)
    assert_close(moments.trace(), expected.trace(), **ALGEBRA)
    assert moments.size == ROWS * COLUMNS


@pytest.mark.parametrize("norm", ["trace", "frobenius", "spectral", "one"])
def test_the_operator_is_the_inverse_of_the_damped_products(norm):
    uses = [tap()]
    moments = GroupedKroneckerBlock().observe(uses, 0.7)
    damped = []
    for A, G in factors(uses, 0.7):
        damped_A, damped_G = dense.factored_tikhonov([[A]], [[G]], GAMMA, norm)
        damped.append((damped_A[0][0], damped_G[0][0]))
    expected = torch.linalg.inv(on_the_diagonal(damped))
    operator = moments.damped(GAMMA, FactoredTikhonov(norm))
    assert_relative(operator.to_dense(), expected)
    V = normal(ROWS, COLUMNS, seed=9)
    assert_relative(dense.vec(operator.mv(V)), expected @ dense.vec(V))
    prepared = BlockDiagonalInverse(FactoredTikhonov(norm)).prepare(Curvature((moments,)))
    loaded = unpack(pack(prepared.damped(GAMMA)))
    assert torch.equal(loaded.mv([V])[0], operator.mv(V))


def test_the_exact_form_is_replaced_by_the_factored_one():
    moments = GroupedKroneckerBlock().observe([tap()], 0.7)
    found = moments.damped(GAMMA, ExactTikhonov()).to_dense()
    assert torch.equal(found, moments.damped(GAMMA, FactoredTikhonov()).to_dense())


def test_several_backward_passes_share_one_forward_pass():
    once, twice = (GroupedKroneckerBlock().average(None, 0.0) for _ in range(2))
    once.add([tap()], 1.0, 0.7)
    twice.add([tap()], 1.0, 0.35)
    twice.add([tap()], 0.0, 0.35)
    assert_close(once.value().dense(), twice.value().dense(), **ALGEBRA)


def test_the_mean_over_the_inputs_is_one_over_all_passes():
    """However many places their examples have."""
    average = GroupedKroneckerBlock().average(None, 0.0)
    average.add([tap()], 1.0, 0.7)
    average.add([tap(seed=7, places=1)], 1.0, 0.7)
    expected = GroupedKroneckerBlock().observe([tap(), tap(seed=7, places=1)], 0.7)
    assert_close(average.value().dense(), expected.dense(), **ALGEBRA)


def test_one_group_without_an_inverse_is_named():
    use = tap()
    use.inputs[1], use.grads[1] = 0, 0
    moments = GroupedKroneckerBlock().observe([use], 0.7)
    with pytest.raises(NotPositiveDefiniteError, match=r"A\[1\]"):
        moments.damped(0.0, FactoredTikhonov("one"))
    assert bool(
        moments.damped(GAMMA, FactoredTikhonov()).mv(normal(ROWS, COLUMNS)).isfinite().all()
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_probe_finds_what_is_not_finite(bad):
    use = tap()
    use.grads[2, 1, 0, 1] = bad
    moments = GroupedKroneckerBlock().observe([use], 0.7)
    assert not all(bool(number.isfinite()) for number in moments.probe())
    with pytest.raises((NonFiniteError, NotPositiveDefiniteError)):
        moments.damped(GAMMA, FactoredTikhonov())


def test_a_unit_that_is_never_used_is_told_of():
    with pytest.raises(UnsupportedModelError, match="not used by any"):
        GroupedKroneckerBlock().average(None, 0.0).value()
    old = GroupedKroneckerBlock().observe([tap()], 0.7)
    assert GroupedKroneckerBlock().average(old, 0.9).value() == old


def test_the_sampling_error_is_the_mean_of_the_groups():
    moments = GroupedKroneckerBlock().observe([tap()], 0.7)
    groups = [KroneckerMoments(*pair) for pair in zip(moments.A, moments.G, strict=True)]
    found = Curvature((moments,), examples=7.0).sampling_error()
    assert found == pytest.approx(Curvature(tuple(groups), examples=7.0).sampling_error())


def test_a_state_of_another_shape_is_refused():
    moments = GroupedKroneckerBlock().observe([tap()], 0.7)
    moments.check(Layout("unit", ROWS, COLUMNS, torch.float64))
    with pytest.raises(StateError, match="unit"):
        moments.check(Layout("unit", ROWS, COLUMNS + 1, torch.float64))
    with pytest.raises(StateError, match="unit"):
        moments.check(Layout("unit", ROWS + EACH, COLUMNS, torch.float64))
