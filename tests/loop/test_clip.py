"""`QuadraticModel(radius=…)`: a step whose Fisher norm is no larger than that."""

import copy

import pytest
import torch
from torch import nn

from kronfac import KFAC, FixedDamping, FixedGamma, Intervals, QuadraticModel
from tests.loop.loops import step_without_closure
from tests.optimizer.test_any_network import dense_model


@pytest.mark.parametrize("radius", [0.01, 0.1, 1e6])
def test_the_fisher_norm_of_the_step(radius: float) -> None:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(30, 3).double(), torch.randint(3, (30,))
    _, F = dense_model(start, nn.CrossEntropyLoss(), (x,), y)
    steps, reports = [], []
    for bound in (None, radius):
        model = copy.deepcopy(start)
        optimizer = KFAC(
            model,
            nn.CrossEntropyLoss(),
            damping=FixedDamping(0.01),
            gamma=FixedGamma(0.1),
            step_rule=QuadraticModel(False, bounded=False, memory=None, radius=bound),
            intervals=Intervals(fisher_fraction=1.0),
        )
        step_without_closure(optimizer, lambda m=model, o=optimizer: o.objective.module(m(x), y))
        pairs = zip(model.parameters(), start.parameters(), strict=True)
        steps.append(torch.cat([(p - q).detach().flatten() for p, q in pairs]))
        reports.append(optimizer.report)
    free, clipped = steps
    norm = float(free @ F @ free) ** 0.5
    share = min(1.0, radius / norm)
    torch.testing.assert_close(clipped, share * free, rtol=1e-8, atol=1e-12)
    # M(c δ) = c g + c² q / 2, and along its minimiser g = −q.
    assert reports[1].predicted_change == pytest.approx(
        (2 * share - share**2) * reports[0].predicted_change, rel=1e-8
    )


def test_a_radius_that_makes_no_sense() -> None:
    with pytest.raises(ValueError, match=r"QuadraticModel's radius is positive.*got 0\.0"):
        QuadraticModel(radius=0.0)
