"""The ten problems of `kronfac bench ordinary`: of many kinds, standardised, without leaks."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from kronfac_experiments.bench.ordinary import problems as data
from kronfac_experiments.bench.ordinary.problems import PROBLEMS, problems_named
from kronfac_experiments.task import Cases

SIZES = {
    "digits": (1198, 599),
    "digits-deep": (1198, 599),
    "autoencoder": (1198, 599),
    "cancer": (380, 189),
    "wine": (119, 59),
    "iris": (100, 50),
    "diabetes": (295, 147),
    "linnerud": (14, 6),
    "friedman": (2000, 1000),
    "spirals": (400, 200),
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=list(PROBLEMS))

# ----------------------------------------------------------------------------------------- problems


@every_problem
def test_a_problem_loads_and_its_network_fits(problem):
    split = problem.split
    assert (len(split.train), len(split.validation)) == SIZES[problem.name]
    model, loss = problem.make_model(0), problem.make_loss()
    for part in (split.train, split.validation):
        assert part.inputs.dtype == torch.float32
        assert loss(model(part.inputs), part.targets).isfinite()
    direct = loss(model(split.train.inputs), split.train.targets).item()
    assert problem.training_loss(model) == pytest.approx(direct, rel=1e-5)


@every_problem
def test_inputs_and_regression_targets_are_standardised_by_the_training_cases(problem):
    train = problem.split.train
    tables = [train.inputs, *([train.targets] if problem.loss is nn.MSELoss else [])]
    for table in (table.double() for table in tables):
        deviation = table.std(dim=0, correction=0)
        torch.testing.assert_close(
            table.mean(dim=0), torch.zeros_like(deviation), atol=1e-5, rtol=0
        )
        varies = deviation > 0
        assert varies.any()
        torch.testing.assert_close(
            deviation[varies], torch.ones_like(deviation[varies]), atol=1e-4, rtol=0
        )


@every_problem
def test_the_validation_cases_are_other_cases_and_change_nothing_for_the_training_cases(problem):
    inputs, targets = problem.table()
    split = data._split(inputs, targets, problem.loss)
    order = np.random.default_rng(data.SPLIT_SEED).permutation(len(inputs))
    held_out = order[: len(order) // 3]
    changed = inputs.copy()
    changed[held_out] = 1e6
    other = data._split(changed, changed if targets is inputs else targets, problem.loss)
    assert torch.equal(other.train.inputs, split.train.inputs)
    assert (other.validation.inputs != split.validation.inputs).any()
    assert len(split.train) + len(split.validation) == len(inputs)


def test_the_problems_are_of_many_kinds():
    everything = list(PROBLEMS.values())
    assert len(everything) == 10
    batches = [problem.batch for problem in everything]
    assert batches.count(32) >= 2
    assert batches.count(None) >= 3
    assert sum(64 <= (batch or 0) <= 128 for batch in batches) >= 2
    assert sum(256 <= (batch or 0) <= 512 for batch in batches) >= 2
    assert {len(problem.hidden) for problem in everything} == {1, 2, 3, 4, 5, 6}
    activations = {nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid}
    assert {problem.activation for problem in everything} == activations
    losses = {nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, nn.MSELoss}
    assert {problem.loss for problem in everything} == losses


def test_a_seed_makes_a_network_and_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    one, same, other = (PROBLEMS["iris"].make_model(seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one[0].weight, same[0].weight)
    assert not torch.equal(one[0].weight, other[0].weight)
    torch.manual_seed(0)
    assert torch.equal(one[0].weight, nn.Linear(4, 16).weight)


class Fixed(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.outputs = torch.tensor(outputs)

    def forward(self, x):
        return self.outputs[: len(x)]


def test_errors():
    x = torch.zeros(2, 1)
    classes = Cases(x, torch.tensor([1, 0]))
    assert PROBLEMS["iris"].error(Fixed([[0.0, 1.0], [0.0, 1.0]]), classes) == 50
    yes = Cases(x, torch.tensor([[1.0], [0.0]]))
    assert PROBLEMS["cancer"].error(Fixed([[0.3], [-0.3]]), yes) == 0
    numbers = Cases(x, torch.tensor([[1.0], [0.0]]))
    assert PROBLEMS["diabetes"].error(Fixed([[2.0], [2.0]]), numbers) == 2.5
    assert math.isnan(PROBLEMS["iris"].error(Fixed([[math.nan, 1.0], [0.0, 1.0]]), classes))


def test_problems_come_in_the_order_of_the_table():
    assert [problem.name for problem in problems_named(["wine", "digits"])] == ["digits", "wine"]
    assert problems_named([]) == tuple(PROBLEMS.values())
