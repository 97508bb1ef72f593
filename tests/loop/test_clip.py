"""`QuadraticModel(radius=…)`: a step whose Fisher norm is no larger than that."""

import copy

import pytest
import torch
from torch import nn

from kronfac import KFAC, FixedDamping, FixedGamma, Intervals, QuadraticModel
from tests.loop.loops import step_without_closure


def dense_fisher(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """F = E[Jᵀ (diag p − p pᵀ) J] over all examples, in the order of the parameters."""
    names, parameters = zip(*model.named_parameters(), strict=True)

    def outputs(*values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (x,))

    found = torch.autograd.functional.jacobian(outputs, tuple(p.detach() for p in parameters))
    J = torch.cat([part.flatten(2) for part in found], dim=2)  # (examples, classes, parameters)
    p = model(x).softmax(1).detach()
    F_R = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return torch.einsum("nia,nij,njb->ab", J, F_R, J) / len(x)


@pytest.mark.parametrize("radius", [0.01, 0.1, 1e6])
def test_the_fisher_norm_of_the_step(radius: float) -> None:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(30, 3).double(), torch.randint(3, (30,))
    F = dense_fisher(start, x)
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
