"""Where K-FAC is exact: a deep linear network with a Gaussian likelihood.

∂f/∂s_i is the same for all cases there, so E[a aᵀ ⊗ g gᵀ] = E[a aᵀ] ⊗ E[g gᵀ], block by block.
"""

from dataclasses import replace

import torch
from torch import nn
from torch.testing import assert_close

from kronfac.curvature import DenseBlock, ExactFisher, KroneckerBlock
from kronfac.record import record
from tests.conftest import AUTODIFF, batch, mlp, network_of, normal
from tests.curvature.test_estimate import estimate_on
from tests.reference import dense

# ------------------------------------------------------------------------------------- shared weights


def blocks_of(F, network):
    """The diagonal blocks of a matrix over the parameters in the order of the units."""
    sizes = [unit.shape[0] * unit.shape[1] for unit in network.units]
    return [row.split(sizes, dim=1)[i] for i, row in enumerate(F.split(sizes))]


def dense_fisher(network, part):
    """Σ_t s J_tᵀ J_t / σ² for a Gaussian, vec(V) of every unit stacking columns."""
    (terms,) = part.terms
    (z,) = part.run(network.model)
    rows = []
    for output in terms.matrix(z).reshape(-1):
        grads = torch.autograd.grad(output, network.parameters, retain_graph=True)
        rows.append(dense.flatten(network.join(grads)))
    J = torch.stack(rows)
    return terms.scale / terms.likelihood.variance * J.mT @ J


def test_expand_is_exact_if_every_place_has_a_term_of_its_own():
    """Sequences whose tokens do not meet: they are examples, by another name."""
    model, x = mlp([3, 4, 2], "identity"), normal(6, 5, 3)
    network, loss = network_of(model, nn.MSELoss()), nn.MSELoss()
    with record(model, network.objective) as recording:
        loss(model(x).reshape(-1, 2), torch.zeros(30, 2).double()).backward()
    rows = recording.batch()
    curvature = estimate_on(network, rows, ExactFisher())
    F = dense_fisher(network, rows.passes[0])
    for block, expected in zip(curvature.blocks, blocks_of(F, network), strict=True):
        assert_close(block.dense(), expected, **AUTODIFF)


class Pooled(nn.Module):
    """The mean over the places of a sequence, between two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp([3, 4])[0], mlp([4, 2], seed=1)[0]

    def forward(self, x):
        return self.second(self.first(x).mean(dim=1))


def test_reduce_is_exact_if_places_are_pooled():
    model, x = Pooled(), normal(6, 5, 3)
    network = network_of(model, nn.MSELoss())
    reduced = [replace(unit, block=KroneckerBlock("reduce")) for unit in network.units]
    network = replace(network, units=reduced)
    rows = batch(network, x, torch.zeros(6, 2).double())
    curvature = estimate_on(network, rows, ExactFisher())
    F = dense_fisher(network, rows.passes[0])
    for block, expected in zip(curvature.blocks, blocks_of(F, network), strict=True):
        assert_close(block.dense(), expected, **AUTODIFF)


class Anything(nn.Module):
    """A layer used twice, a tied weight, a scale, a mean over places; nothing in it is linear."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = mlp([3, 3])[0], mlp([3, 3], seed=1)[0]
        self.out.weight = self.inner.weight
        self.scale = nn.Parameter(normal(3, seed=2))

    def forward(self, x):
        h = torch.tanh(self.inner(x + torch.tanh(self.inner(x)))) * self.scale
        return self.out(h).mean(dim=1)


def test_a_dense_block_is_the_fishers_own_whatever_the_network():
    """Units whose uses are seen: those of an example are added up before they are squared."""
    model, x = Anything(), normal(6, 2, 3)
    network = network_of(model, nn.MSELoss())
    network = replace(network, units=[replace(u, block=DenseBlock()) for u in network.units])
    rows = batch(network, x, torch.zeros(6, 3).double())
    curvature = estimate_on(network, rows, ExactFisher())
    F = dense_fisher(network, rows.passes[0])
    pairs = zip(network.units, curvature.blocks, blocks_of(F, network), strict=True)
    found = {unit.name: (block.dense(), expected) for unit, block, expected in pairs}
    assert found.keys() == {"inner.weight", "inner.bias", "out.bias", "scale"}
    for block, expected in found.values():
        assert_close(block, expected, **AUTODIFF)
