import io

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac_experiments.training import averaged


def iterates(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, 2, generator=generator, dtype=torch.float64) for _ in range(count)]


def run(decay: float, values: list[torch.Tensor]) -> list[torch.Tensor]:
    model = nn.Linear(2, 3, bias=False, dtype=torch.float64)
    average = averaged(model, decay)
    means = []
    for value in values:
        with torch.no_grad():
            model.weight.copy_(value)
        average.update_parameters(model)
        means.append(average.module.weight.detach().clone())
    return means


def test_first_update_copies_and_early_ones_are_the_plain_mean():
    values = iterates(100)
    means = run(0.99, values)
    assert torch.equal(means[0], values[0])
    for t in (2, 7, 100):
        assert_close(means[t - 1], torch.stack(values[:t]).mean(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_follows_the_recursion_of_the_authors_program(decay):
    values = iterates(40)
    expected = torch.zeros(3, 2, dtype=torch.float64)
    for k, (value, mean) in enumerate(zip(values, run(decay, values), strict=True), start=200):
        xi = min(1 - 1 / (k - 199), decay)
        expected = xi * expected + (1 - xi) * value
        assert_close(mean, expected, rtol=1e-10, atol=1e-12)


def test_state_survives_a_file_of_plain_tensors():
    model = nn.Linear(2, 3)
    average = averaged(model, 0.9)
    for _ in range(3):
        average.update_parameters(model)
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    resumed = averaged(nn.Linear(2, 3), 0.9)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert resumed.n_averaged == 3
    assert torch.equal(resumed.module.weight, average.module.weight)


@pytest.mark.parametrize("decay", [-0.1, 1.0])
def test_refuses_a_decay_outside_its_range(decay):
    with pytest.raises(ValueError, match=f"decay={decay}"):
        averaged(nn.Linear(2, 3), decay)
