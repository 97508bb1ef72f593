"""Loss modules as likelihoods with a scale."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.errors import UnsupportedLossError
from kronfac.objective import Bernoulli, Categorical, Gaussian, objective_of
from tests.conftest import ALGEBRA, AUTODIFF, normal, seeded
from tests.reference import dense

CASES, OUTPUTS = 4, 3
INDICES = torch.tensor([0, 2, 1, 1])
GREY = torch.rand(CASES, OUTPUTS, generator=seeded(1), dtype=torch.float64)
SOFT = normal(CASES, OUTPUTS, seed=2).softmax(dim=1)
REAL = normal(CASES, OUTPUTS, seed=3)

LOSSES = [
    (nn.MSELoss(), REAL, Gaussian),
    (nn.MSELoss(reduction="sum"), REAL, Gaussian),
    (nn.BCEWithLogitsLoss(), GREY, Bernoulli),
    (nn.BCEWithLogitsLoss(reduction="sum"), GREY, Bernoulli),
    (nn.CrossEntropyLoss(), INDICES, Categorical),
    (nn.CrossEntropyLoss(reduction="sum"), INDICES, Categorical),
    (nn.CrossEntropyLoss(), SOFT, Categorical),
    (nn.CrossEntropyLoss(reduction="sum"), SOFT, Categorical),
    (nn.CrossEntropyLoss(label_smoothing=0.2), INDICES, Categorical),
    (nn.CrossEntropyLoss(label_smoothing=0.2, reduction="sum"), SOFT, Categorical),
    (Gaussian(variance=0.3), REAL, Gaussian),
    (Bernoulli(), GREY, Bernoulli),
    (Categorical(label_smoothing=0.1), INDICES, Categorical),
]
each_loss = pytest.mark.parametrize(("loss", "targets", "kind"), LOSSES)


@each_loss
def test_total_is_the_module(loss, targets, kind):
    objective = objective_of(loss)
    assert isinstance(objective.likelihood, kind)
    z = normal(CASES, OUTPUTS)
    assert_close(objective.total(z, targets, CASES), loss(z, targets), **ALGEBRA)


@each_loss
def test_totals_of_chunks_add_up_to_the_module(loss, targets, kind):
    objective = objective_of(loss)
    z = normal(CASES, OUTPUTS)
    parts = [objective.total(z[s], targets[s], CASES) for s in (slice(0, 1), slice(1, CASES))]
    assert_close(sum(parts), loss(z, targets), **ALGEBRA)


@each_loss
def test_case_weight_scales_the_fisher_to_the_hessian_of_the_loss(loss, targets, kind):
    """∂²loss/∂z² = c/cases · diag(F_R of case 1, F_R of case 2, …): no curvature between cases."""
    objective = objective_of(loss)
    z = normal(CASES, OUTPUTS)
    hessian = torch.func.hessian(lambda z: loss(z, targets))(z)  # (cases, outputs)²
    variance = getattr(objective.likelihood, "variance", 1.0)
    F_R = dense.output_fisher(z, kind.__name__.lower(), variance)
    c = objective.case_weight(CASES, OUTPUTS)
    for i in range(CASES):
        for j in range(CASES):
            expected = c / CASES * F_R[i] if i == j else torch.zeros_like(F_R[i])
            assert_close(hessian[i, :, j], expected, **AUTODIFF)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_element_wise_losses_count_all_outputs_of_a_case(loss):
    z, y = normal(CASES, 2, 3), GREY.repeat(1, 2).reshape(CASES, 2, 3)
    objective = objective_of(loss)
    assert_close(objective.total(z, y, CASES), loss(z, y), **ALGEBRA)
    assert objective.case_weight(CASES, 6) == 1 / 6


class Subclass(nn.MSELoss):
    pass


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.L1Loss(), "L1Loss is not one it knows"),
        (nn.SmoothL1Loss(), "SmoothL1Loss is not one it knows"),
        (nn.NLLLoss(), "NLLLoss is not one it knows"),
        (nn.BCELoss(), "BCELoss is not one it knows"),
        (nn.Linear(2, 2), "Linear is not one it knows"),
        (Subclass(), "Subclass is not one it knows"),
        (nn.MSELoss(reduction="none"), "a scalar; got 'none'"),
        (nn.BCEWithLogitsLoss(reduction="none"), "a scalar; got 'none'"),
        (nn.CrossEntropyLoss(reduction="none"), "a scalar; got 'none'"),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "CrossEntropyLoss with weight"),
        (nn.BCEWithLogitsLoss(weight=torch.ones(3)), "BCEWithLogitsLoss with weight"),
        (nn.BCEWithLogitsLoss(pos_weight=torch.ones(3)), "BCEWithLogitsLoss with pos_weight"),
    ],
)
def test_losses_that_are_no_plain_likelihood_are_refused(loss, message):
    with pytest.raises(UnsupportedLossError, match=message):
        objective_of(loss)


def test_ignore_index_is_known_for_cross_entropy_alone():
    assert objective_of(nn.CrossEntropyLoss(ignore_index=7)).ignore_index == 7
    assert objective_of(nn.MSELoss()).ignore_index is None
