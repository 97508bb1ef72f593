import io

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from kronfac.errors import StateError
from kronfac_experiments.training import ExponentialBatchSize, ScheduledBatchSampler

PAPER = ExponentialBatchSize(initial=1000, final=60_000, iterations=500)


# From the log of the authors' MNIST run.
@pytest.mark.parametrize(
    ("k", "size"),
    [
        (1, 1000),
        (2, 1008),
        (3, 1016),
        (50, 1494),
        (100, 2253),
        (199, 5076),
        (200, 5118),
        (201, 5160),
        (300, 11626),
        (400, 26412),
        (499, 59509),
        (500, 60000),
        (501, 60000),
        (1547, 60000),
        (10**9, 60000),
    ],
)
def test_sizes_of_the_authors_run(k, size):
    assert PAPER(k) == size


def test_cases_processed_in_the_authors_run():
    assert sum(map(PAPER, range(1, 201))) == 504_877
    assert sum(map(PAPER, range(1, 501))) == 7_220_935


def test_no_growth_is_allowed():
    assert {ExponentialBatchSize(7, 7, 10)(k) for k in range(1, 20)} == {7}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 10, 5), "initial=0"),
        ((11, 10, 5), "initial=11 and final=10"),
        ((1, 10, 1), "iterations=1"),
    ],
)
def test_schedule_checks_its_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ExponentialBatchSize(*arguments)
    with pytest.raises(ValueError, match="from 1, got k=0"):
        PAPER(0)


def test_batches_are_the_start_of_fresh_permutations():
    sampler = ScheduledBatchSampler(50, ExponentialBatchSize(10, 50, 8))
    batches = [sampler.next_indices() for _ in range(10)]
    sizes = [len(batch) for batch in batches]
    assert sizes[0] == 10
    assert sizes[-3:] == [50, 50, 50]
    for batch in batches:
        assert len(batch.unique()) == len(batch)
    assert sorted(batches[-1].tolist()) == list(range(50))
    assert not torch.equal(batches[-1], batches[-2])


def test_every_case_is_as_likely_as_any_other():
    sampler = ScheduledBatchSampler(20, 5)
    counts = torch.zeros(20)
    for _ in range(4000):
        counts[sampler.next_indices()] += 1
    # Binomial(4000, 1/4): mean 1000, standard deviation 27.4; five of them.
    assert (counts - 1000).abs().max() < 137


def test_resumes_exactly_from_a_file_of_plain_tensors():
    schedule = ExponentialBatchSize(5, 100, 30)
    sampler = ScheduledBatchSampler(100, schedule, seed=4)
    for _ in range(7):
        sampler.next_indices()
    file = io.BytesIO()
    torch.save(sampler.state_dict(), file)
    expected = [sampler.next_indices() for _ in range(30)]

    file.seek(0)
    resumed = ScheduledBatchSampler(100, schedule, seed=99)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.iteration == 7
    for batch in expected:
        assert torch.equal(resumed.next_indices(), batch)


def test_seed_decides_and_the_global_generator_does_not():
    first = ScheduledBatchSampler(100, 10, seed=1)
    before = torch.get_rng_state()
    batch = first.next_indices()
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(batch, ScheduledBatchSampler(100, 10, seed=1).next_indices())
    assert not torch.equal(batch, ScheduledBatchSampler(100, 10, seed=2).next_indices())


def test_in_a_data_loader():
    data = torch.arange(40.0)
    loader = DataLoader(TensorDataset(data), batch_sampler=ScheduledBatchSampler(40, lambda k: k))
    alone = ScheduledBatchSampler(40, lambda k: k)
    for k, (batch,) in enumerate(loader, start=1):
        assert torch.equal(batch, data[alone.next_indices()])
        assert len(batch) == k
        if k == 5:
            break


def test_sampler_refuses_sizes_and_states_that_do_not_fit():
    with pytest.raises(ValueError, match="batch size of 11 at iteration 1 with 10 cases"):
        ScheduledBatchSampler(10, 11)
    with pytest.raises(ValueError, match="cases=0"):
        ScheduledBatchSampler(0, 1)
    growing = ScheduledBatchSampler(10, lambda k: 5 * k)
    growing.next_indices()
    growing.next_indices()
    with pytest.raises(ValueError, match="batch size of 15 at iteration 3"):
        growing.next_indices()
    with pytest.raises(StateError, match="saved with 10 cases"):
        ScheduledBatchSampler(20, 5).load_state_dict(growing.state_dict())
