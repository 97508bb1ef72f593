"""uᵀFv from forward-mode products alone, against the dense Fisher."""

import torch
from torch import nn

from kronfac.linearize import fisher_gram
from kronfac.objective import Gaussian
from kronfac.record import record
from tests.conformance import assert_relative
from tests.conftest import (
    batch,
    mlp,
    network_of,
    normal,
    passes_either_way,
)
from tests.reference import dense

WIDTHS = [4, 5, 3, 2]

passes = passes_either_way()


def vectors(model, count):
    size = len(dense.theta(model))
    return [normal(size, seed=seed) for seed in range(count)]


@torch.no_grad()  # as in `KFAC.step`
def gram_of(model, loss, x, flat, chunk=None, targets=None, factor=1.0):
    directions = [dense.unflatten(v, dense.shapes(model)) for v in flat]
    network = network_of(model, loss)
    return fisher_gram(network, batch(network, x, targets, chunk), directions, factor)


def expected_gram(F, flat):
    V = torch.stack(flat, dim=1)
    return V.mT @ F @ V


def test_float32_directions_give_a_float64_gram():
    model, x = mlp(WIDTHS), normal(12, 4)
    flat = vectors(model, 2)
    single = gram_of(model.float(), Gaussian(), x.float(), [v.float() for v in flat])
    assert single.dtype == torch.float64
    F = dense.exact_fisher(mlp(WIDTHS), x, "gaussian")
    assert_relative(single, expected_gram(F, flat), 1e-5)


def test_directions_see_the_same_dropout_masks():
    """Then the Gram matrix of v, v and 2v is that of one number, to rounding; the RNG is restored."""
    model = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Dropout(0.5), nn.Linear(20, 3)).double()
    V = (normal(20, 5, seed=1), normal(3, 21, seed=2))
    directions = [V, V, tuple(2 * v for v in V)]
    network = network_of(model, Gaussian())
    with record(model, network.objective) as recording:
        z = model(normal(12, 4))
        Gaussian()(z, torch.zeros_like(z)).backward()
    before = torch.get_rng_state()
    gram = fisher_gram(network, recording.batch(), directions)
    assert torch.equal(torch.get_rng_state(), before)
    pattern = torch.tensor([[1, 1, 2], [1, 1, 2], [2, 2, 4]], dtype=torch.float64)
    assert_relative(gram, gram[0, 0] * pattern)


def test_outputs_come_with_the_products():
    """A pass for each direction and no further one: the passes compute the outputs too."""
    model = nn.Sequential(mlp(WIDTHS), nn.LayerNorm(2, dtype=torch.float64))
    network = network_of(model, Gaussian())
    made = batch(network, normal(6, 4))
    network.learned.compared = True
    seen = []
    model.register_forward_hook(lambda *_: seen.append(1))
    directions = [tuple(normal(*u.shape, seed=s) for u in network.units) for s in range(2)]
    with torch.no_grad():
        fisher_gram(network, made, directions)
    assert len(seen) == 2
