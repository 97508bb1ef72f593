"""Uses that are not those of a layer as it is meant: renormalised, without a gradient, summed."""

import pytest
import torch
from torch import nn

from kronfac import KFAC
from kronfac.curvature import ExactFisher, KroneckerBlock
from tests.conftest import normal
from tests.layers.architectures import Architecture
from tests.layers.modules import EXAMPLES
from tests.layers.problems import Problem, regression


def step(model: nn.Module, x: torch.Tensor, outputs: int = 2) -> KFAC:
    optimizer = KFAC(model, nn.MSELoss())
    y = normal(len(x), outputs).to(next(model.parameters()).dtype)
    optimizer.step(optimizer.closure(x, y))
    return optimizer


def test_an_embedding_that_renormalises_its_rows():
    """In place, when it looks them up: K-FAC's own passes may do so again, and nothing more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3, max_norm=1.0), nn.Flatten(), nn.Linear(12, 2)).double()
    words = torch.randint(8, (16, 4), generator=torch.Generator().manual_seed(1))
    unused = model[0].weight.detach()[8].clone()
    optimizer = step(model, words)
    assert all(unit.observed for unit in optimizer.network.units)
    assert optimizer.report is not None
    assert not optimizer.report.refused
    torch.testing.assert_close(model[0].weight[8], unused, rtol=0, atol=0)


class PartlyDetached(nn.Module):
    """A layer that is used twice, once without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x):
        with torch.no_grad():
            start = torch.tanh(self.layer(x))
        return self.layer(x) - 0.5 * start


def test_a_use_without_a_gradient_is_a_constant():
    """To J v as to the gradient."""
    optimizer = step(PartlyDetached().double(), normal(8, 3))
    assert optimizer.network.learned.forward_mode
    (unit,) = optimizer.network.units
    assert unit.observed
    assert isinstance(unit.block, KroneckerBlock)


def mean_of_draws(problem: Problem, draws: int) -> list[torch.Tensor]:
    """For each unit, what many estimates with other random signs show, (draws, size, size)."""
    found = [problem.curvature(ExactFisher(), seed=seed) for seed in range(draws)]
    units = range(len(problem.network.units))
    return [torch.stack([c.blocks[n].dense() for c in found]) for n in units]


@pytest.mark.parametrize("per_place", [True, False])
def test_a_table_that_is_looked_up_once_for_all_examples(per_place):
    """Gradients are summed over examples there; with random signs the square is right on average.

    Along three directions, within five standard errors of 100 estimates.
    """
    spec = Architecture("sequences", ("table of positions", "Linear"), per_place=per_place)
    problem = regression(spec.build(), spec.inputs())
    assert problem.examples == EXAMPLES
    drawn = mean_of_draws(problem, 100)
    for n, unit in enumerate(problem.network.units):
        expected = problem.truth.moments(unit)
        for seed in range(3):
            u = normal(len(expected), seed=seed)
            values = torch.einsum("i,nij,j->n", u, drawn[n], u)
            error = 5 * values.std() / 10 + 1e-12
            assert (values.mean() - u @ expected @ u).abs() <= error, unit
