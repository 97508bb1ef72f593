"""What surrounds the optimizer: mini-batches that grow, averaged iterates, the sparse start."""

import io

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.errors import StateError
from kronfac_experiments.training import (
    ExponentialBatchSize,
    ScheduledBatchSampler,
    averaged,
    sparse_,
)

PAPER = ExponentialBatchSize(initial=1000, final=60_000, iterations=500)
AUTHORS_SIZES = {
    1: 1000,
    2: 1008,
    50: 1494,
    199: 5076,
    300: 11626,
    499: 59509,
    500: 60000,
    10**9: 60000,
}
"""From the log of the authors' MNIST run."""


def test_sizes_of_the_authors_run():
    assert {k: PAPER(k) for k in AUTHORS_SIZES} == AUTHORS_SIZES
    assert sum(map(PAPER, range(1, 201))) == 504_877
    assert sum(map(PAPER, range(1, 501))) == 7_220_935
    assert {ExponentialBatchSize(7, 7, 10)(k) for k in range(1, 20)} == {7}


def test_batches_are_the_start_of_fresh_permutations():
    sampler = ScheduledBatchSampler(50, ExponentialBatchSize(10, 50, 8))
    batches = [sampler.next_indices() for _ in range(10)]
    assert len(batches[0]) == 10
    assert all(len(batch.unique()) == len(batch) for batch in batches)
    assert sorted(batches[-1].tolist()) == list(range(50))
    assert not torch.equal(batches[-1], batches[-2])


def test_the_sampler_resumes_exactly_from_a_file_of_plain_tensors():
    schedule = ExponentialBatchSize(5, 100, 30)
    sampler = ScheduledBatchSampler(100, schedule, seed=4)
    before = torch.get_rng_state()
    for _ in range(7):
        sampler.next_indices()
    assert torch.equal(before, torch.get_rng_state()), "the global generator is left alone"
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    expected = [sampler.next_indices() for _ in range(30)]
    file.seek(0)
    resumed = ScheduledBatchSampler(100, schedule, seed=99)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert all(torch.equal(resumed.next_indices(), batch) for batch in expected)


def test_the_sampler_refuses_sizes_and_states_that_do_not_fit():
    with pytest.raises(ValueError, match="batch size of 11 at iteration 1 with 10 cases"):
        ScheduledBatchSampler(10, 11)
    growing = ScheduledBatchSampler(10, lambda k: 8 * k)
    growing.next_indices()
    with pytest.raises(ValueError, match="batch size of 16 at iteration 2"):
        growing.next_indices()
    with pytest.raises(StateError, match="saved with 10 cases"):
        ScheduledBatchSampler(20, 5).load_state_dict(growing.state_dict())


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9, 0.99])
def test_averages_follow_the_recursion_of_the_authors_program(decay):
    model = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    average = averaged(model, decay)
    expected, values = torch.zeros(3, 2, dtype=torch.float64), []
    generator = torch.Generator().manual_seed(0)
    for k in range(200, 240):
        value = torch.randn(3, 2, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(value)
        average.update_parameters(model)
        values.append(value)
        xi = min(1 - 1 / (k - 199), decay)
        expected = xi * expected + (1 - xi) * value
        assert_close(average.module.weight.detach(), expected, rtol=1e-10, atol=1e-12)
    if decay == 0.99:
        assert_close(expected, torch.stack(values).mean(0), rtol=1e-10, atol=1e-12)


def test_of_fifteen_random_connections_of_a_unit_the_last_of_duplicates_wins():
    layer = nn.Linear(4, 200, dtype=torch.float64)
    before = torch.get_rng_state()
    sparse_(layer, torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.get_rng_state())
    generator = torch.Generator().manual_seed(3)
    columns = torch.randint(4, (200, 15), generator=generator).tolist()
    values = torch.randn(200, 15, generator=generator)
    expected = torch.zeros(200, 4, dtype=torch.float64)
    for unit in range(200):
        for connection, column in enumerate(columns[unit]):
            expected[unit, column] = values[unit, connection]
    assert torch.equal(layer.weight, expected)
    assert not layer.bias.any()


def test_sparse_weights_are_standard_normal():
    layer = nn.Linear(500, 4000)
    sparse_(layer, torch.Generator().manual_seed(0))
    assert (layer.weight != 0).sum(dim=1).max() == 15
    values = layer.weight[layer.weight != 0]
    # 60,000 draws: five standard errors of a mean are 0.02, of a variance 0.029.
    assert abs(values.mean()) < 0.02
    assert abs(values.var() - 1) < 0.03
