"""A unit that has no inverse: its old one stays, the others are refreshed, the event names it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from kronfac import KFAC, Intervals
from kronfac.curvature import BlockDiagonalInverse, BlockTridiagonalInverse
from tests.conftest import mlp, normal
from tests.failures.steps import FIXED, flat
from tests.optimizer.runs import same

X, Y = normal(40, 4), normal(40, 2, seed=1)
BAD = 1


def spoiled(inverse: str) -> KFAC:
    """A run in which the second layer's G has become indefinite."""
    optimizer = KFAC(
        mlp([4, 5, 5, 5, 2]),
        nn.MSELoss(),
        inverse=inverse,
        **FIXED | {"intervals": Intervals(1.0, 1.0, 1)},
    )
    for _ in range(3):
        optimizer.step(optimizer.closure(X, Y))
    assert not optimizer.report.events
    curvature = optimizer._state.curvature
    blocks = list(curvature.blocks)
    blocks[BAD] = replace(blocks[BAD], G=blocks[BAD].G - 1e6 * torch.eye(5))
    optimizer._state = replace(optimizer._state, curvature=replace(curvature, blocks=tuple(blocks)))
    return optimizer


@pytest.mark.parametrize("inverse", ["block_diagonal", "block_tridiagonal"])
def test_a_unit_without_an_inverse_is_named_and_the_others_are_refreshed(inverse):
    optimizer = spoiled(inverse)
    old = optimizer._state.current.inverse
    before = flat(optimizer.model)
    optimizer.step(optimizer.closure(X, Y))
    (event,) = optimizer.report.events
    assert event.kind == "block_failed"
    assert "'2' (" in event.message
    assert all(f"'{name}' (" not in event.message for name in (0, 4, 6))
    assert not torch.equal(flat(optimizer.model), before)
    state = optimizer._state
    assert state.current.iteration == state.iteration == 4
    # The old inverse of this unit alone; of the others what there is without it.
    assert state.current.inverse.of_unit(BAD) is old.of_unit(BAD)
    strategy = BlockTridiagonalInverse if inverse == "block_tridiagonal" else BlockDiagonalInverse
    links = state.curvature.links
    rest = replace(
        state.curvature,
        blocks=state.curvature.blocks[BAD + 1 :],
        links=links[BAD + 1 :],
    )
    fresh = strategy().prepare(rest).damped(FIXED["gamma"].gamma)
    found = replace(fresh, pieces=state.current.inverse.pieces[-len(fresh.pieces) :])
    vectors = [normal(*unit.shape, seed=n) for n, unit in enumerate(optimizer.network.units)]
    assert same(list(found.mv(vectors[BAD + 1 :])), list(fresh.mv(vectors[BAD + 1 :])))
