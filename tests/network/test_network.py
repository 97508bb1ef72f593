"""The parameters of a network as a vector, and what can be changed of a network."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.curvature import Curvature, DiagonalBlock, DiagonalMoments, KroneckerMoments, Link
from tests.conftest import ALGEBRA, mlp, network_of, normal, spd
from tests.reference import dense


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(normal(2, seed=3))
        self.net = mlp([3, 4, 2])

    def forward(self, x):
        return self.net(x) * self.scale


@pytest.fixture
def network():
    return network_of(Scaled())


def vector(network, seed=0):
    return tuple(normal(*unit.shape, seed=seed + n) for n, unit in enumerate(network.units))


def test_join_and_split_are_inverse(network):
    V = vector(network)
    parts = network.split(V)
    assert [part.shape for part in parts] == [p.shape for p in network.parameters]
    assert all(torch.equal(a, b) for a, b in zip(network.join(parts), V, strict=True))


def test_theta_is_a_copy(network):
    theta = network.theta()
    kept = [V.clone() for V in theta]
    assert not any(V.requires_grad for V in theta)
    with torch.no_grad():
        for p in network.parameters:
            p.zero_()
    assert all(torch.equal(a, b) for a, b in zip(theta, kept, strict=True))
    network.place(theta)
    assert all(torch.equal(a, b) for a, b in zip(network.theta(), kept, strict=True))
    assert_close(dense.theta(network.model.net), dense.flatten(theta[1:]), **ALGEBRA)


def test_moving_adds_to_the_parameters(network):
    before, delta = network.theta(), vector(network)
    network.move(delta, 0.5)
    for now, V, d in zip(network.theta(), before, delta, strict=True):
        assert_close(now, V + 0.5 * d, **ALGEBRA)


@pytest.mark.parametrize("fails", [False, True])
def test_a_displacement_is_undone_to_the_bit(network, fails):
    before, delta = network.theta(), vector(network)
    places = [p.data_ptr() for p in network.parameters]
    x, reached = normal(5, 3), []

    def work():
        with network.displaced(delta, 1e3):
            reached.append(network.theta())
            if fails:
                network.model(normal(5, 7))
            network.model(x)

    if fails:
        with pytest.raises(RuntimeError, match="shapes"):
            work()
    else:
        work()
    for now, V, d in zip(reached[0], before, delta, strict=True):
        assert_close(now, V + 1e3 * d, **ALGEBRA)
    assert all(torch.equal(a, b) for a, b in zip(network.theta(), before, strict=True))
    assert [p.data_ptr() for p in network.parameters] == places


def test_units_whose_uses_are_not_all_seen_get_a_diagonal_block(network):
    linked = replace(network, links=[False, True])
    assert [unit.observed for unit in linked.units] == [True, True, True]
    demoted = linked.demoted([2])
    assert [isinstance(unit.block, DiagonalBlock) for unit in demoted.units] == [True, False, True]
    assert [unit.observed for unit in demoted.units] == [True, True, False]
    assert list(demoted.links) == [False, False]
    assert linked.demoted([]) is linked


def test_units_in_another_order(network):
    turned = network.reordered([2, 1, 0], [True, False])
    assert [unit.name for unit in turned.units] == ["net.2", "net.0", "scale"]
    assert list(turned.links) == [True, False]


def test_a_network_goes_on_as_it_was_saved(network):
    """Order and links follow from the saved curvature, fallback blocks from what passes have shown."""
    kronecker = KroneckerMoments(spd(4), spd(4, seed=1))
    last = DiagonalMoments(torch.ones(2, 5))
    scale = DiagonalMoments(torch.ones(2, 1))
    curvature = Curvature(
        (kronecker, last, scale), (Link(torch.zeros(4, 5), torch.zeros(4, 2)), None)
    )
    saved = network.reordered([1, 2, 0], [True, False]).demoted([1])
    learned = replace(saved, discovered=True).learned_state()
    continued = network.continued([1, 2, 0], curvature, learned)
    assert [unit.name for unit in continued.units] == ["net.0", "net.2", "scale"]
    assert [unit.observed for unit in continued.units] == [unit.observed for unit in saved.units]
    assert [type(u.block) for u in continued.units] == [type(u.block) for u in saved.units]
    assert list(continued.links) == [True, False]
    undiscovered = network.continued([0, 1, 2], None, network.learned_state())
    assert undiscovered.units is network.units
