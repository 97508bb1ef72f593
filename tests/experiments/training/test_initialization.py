import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac_experiments.training import sparse_


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_every_unit_has_at_most_fifteen_weights_and_no_bias():
    model = nn.Sequential(nn.Linear(784, 300), nn.Sigmoid(), nn.Linear(300, 40))
    assert sparse_(model, generator=seeded()) is model
    for layer in (model[0], model[2]):
        weights_per_unit = (layer.weight != 0).sum(dim=1)
        assert weights_per_unit.max() == 15
        assert weights_per_unit.min() >= 10
        assert not layer.bias.any()


def test_weights_are_standard_normal_and_inputs_uniform():
    layer = sparse_(nn.Linear(500, 4000), generator=seeded())
    values = layer.weight[layer.weight != 0]
    # 60,000 draws: five standard errors of a mean are 0.02, of a variance 0.029.
    assert abs(values.mean()) < 0.02
    assert abs(values.var() - 1) < 0.03
    uses = (layer.weight != 0).sum(dim=0).double()  # Poisson with mean 120, less the duplicates
    assert_close(uses.mean().item(), 4000 * (1 - (1 - 1 / 500) ** 15), rtol=0.01, atol=0)
    assert 0.7 < uses.var() / uses.mean() < 1.3


def test_of_duplicate_connections_the_last_wins():
    connections = 15
    layer = sparse_(nn.Linear(4, 200), connections, generator=seeded(3))
    generator = seeded(3)
    columns = torch.randint(4, (200, connections), generator=generator).tolist()
    values = torch.randn(200, connections, generator=generator)
    expected = torch.zeros(200, 4)
    for unit in range(200):
        for connection, column in enumerate(columns[unit]):
            expected[unit, column] = values[unit, connection]
    assert torch.equal(layer.weight, expected)


def test_fewer_inputs_than_connections():
    layer = sparse_(nn.Linear(1, 5, bias=False), generator=seeded())
    assert (layer.weight != 0).all()


def test_same_seed_same_weights_in_every_dtype_and_no_global_draw():
    before = torch.get_rng_state()
    single = sparse_(nn.utils.skip_init(nn.Linear, 50, 20), generator=seeded(1))
    double = sparse_(
        nn.utils.skip_init(nn.Linear, 50, 20, dtype=torch.float64), generator=seeded(1)
    )
    other = sparse_(nn.utils.skip_init(nn.Linear, 50, 20), generator=seeded(2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(single.weight.double(), double.weight)
    assert not torch.equal(single.weight, other.weight)
    assert single.weight.requires_grad


def test_refuses_what_it_cannot_initialise():
    with pytest.raises(ValueError, match="Conv2d holds none"):
        sparse_(nn.Conv2d(1, 1, 3))
    with pytest.raises(ValueError, match="connections=0"):
        sparse_(nn.Linear(2, 2), connections=0)
