"""Loss modules as likelihoods with terms, weights and a scale."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac.errors import TargetError, UnsupportedLossError
from kronfac.objective import READERS, Bernoulli, Categorical, Gaussian, objective_of
from tests.conftest import ALGEBRA, AUTODIFF, normal, seeded

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
def test_terms_have_the_gradient_of_the_module(loss, targets, kind):
    """s Σ w ∂(−log r)/∂z. Their curvature is tested in test_every_loss.py."""
    objective = objective_of(loss)
    assert isinstance(objective.likelihood, kind)
    z = normal(CASES, OUTPUTS).requires_grad_()
    terms = objective.read(z.detach(), targets)
    assert (terms.count, terms.event, terms.weight) == (CASES, OUTPUTS, None)
    (expected,) = torch.autograd.grad(loss(z, targets), z)
    score = terms.likelihood.score(terms.matrix(z.detach()), terms.targets)
    assert_close(terms.weigh(score), expected, **AUTODIFF)


@each_loss
def test_without_targets_the_terms_are_the_same_but_for_them(loss, targets, kind):
    objective = objective_of(loss)
    read = objective.read(normal(CASES, OUTPUTS), targets)
    declared = objective.declare(torch.Size((CASES, OUTPUTS)))
    assert declared.targets is None
    same = {"likelihood": declared.likelihood, "channels": declared.channels}
    assert replace(read, targets=None, **same) == declared
    z = normal(CASES, OUTPUTS)
    assert torch.equal(read.matrix(z), declared.matrix(z))
    assert declared.total_weight == read.total_weight


@each_loss
def test_a_sum_grows_with_the_number_of_terms_and_a_mean_does_not(loss, targets, kind):
    objective = objective_of(loss)
    few, many = (objective.declare(torch.Size((n, OUTPUTS))) for n in (CASES, 3 * CASES))
    summed = getattr(loss, "reduction", "mean") == "sum"
    assert few.summed == many.summed == summed
    assert many.total_weight == pytest.approx((3 if summed else 1) * few.total_weight)


IGNORED = torch.tensor([0, -100, 1, 1])
CLASSES = torch.tensor([0.5, 2.0, 3.0], dtype=torch.float64)


@pytest.mark.parametrize("factor", [3.0, torch.tensor(3.0, dtype=torch.float64)], ids=str)
@pytest.mark.parametrize("weight", [None, CLASSES], ids=str)
def test_a_factor_scales_the_terms(weight, factor):
    terms = objective_of(nn.CrossEntropyLoss(weight)).read(normal(CASES, OUTPUTS), IGNORED)
    v = normal(CASES, OUTPUTS, seed=1)
    assert_close(terms.scaled(factor).weigh(v), 3 * terms.weigh(v), **ALGEBRA)
    assert terms.scaled(factor).total_weight == pytest.approx(3 * terms.total_weight)


def test_one_example_without_a_batch_dimension_is_one_term():
    z = normal(OUTPUTS)
    terms = objective_of(nn.CrossEntropyLoss()).read(z, torch.tensor(1))
    assert (terms.count, terms.event, terms.total_weight) == (1, OUTPUTS, 1.0)
    product = terms.weigh(
        terms.likelihood.fisher_product(terms.matrix(z), torch.eye(OUTPUTS)[:, None].double())
    )
    F = torch.func.hessian(lambda z: functional.cross_entropy(z, torch.tensor(1)))(z)
    assert_close(product.squeeze(1), F, **AUTODIFF)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_element_wise_losses_count_all_outputs_of_a_term(loss):
    z, y = normal(CASES, 2, 3), GREY.repeat(1, 2).reshape(CASES, 2, 3)
    terms = objective_of(loss).read(z, y)
    assert (terms.count, terms.event) == (CASES, 6)
    assert terms.total_weight == pytest.approx(1 / 6)
    assert torch.equal(terms.targets, y.flatten(1))


class Subclass(nn.MSELoss):
    pass


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (nn.L1Loss(), "L1Loss is not one it knows"),
        (nn.L1Loss(), r"give KFAC kronfac.GaussNewton\(loss\)"),
        (torch.nn.functional.huber_loss, r"got the function huber_loss.*nn\.HuberLoss\(\)"),
        (torch.nn.functional.l1_loss, "the function l1_loss is not one it knows"),
        (nn.MSELoss, r"not its class; got the type MSELoss\. Make one"),
        (nn.SmoothL1Loss(beta=0.0), "needs smooth_l1_loss with a positive beta"),
        (nn.GaussianNLLLoss(reduction="none"), "a scalar; got 'none'"),
        (nn.Linear(2, 2), "Linear is not one it knows"),
        (Subclass(), "Subclass is not one it knows"),
        (nn.MSELoss(reduction="none"), "a scalar; got 'none'"),
        (nn.BCEWithLogitsLoss(reduction="none"), "a scalar; got 'none'"),
        (nn.CrossEntropyLoss(reduction="none"), "a scalar; got 'none'"),
    ],
)
def test_losses_that_are_no_plain_likelihood_are_refused(loss, message):
    with pytest.raises(UnsupportedLossError, match=message):
        objective_of(loss)


@pytest.mark.parametrize(
    ("loss", "outputs", "targets"),
    [
        (nn.CrossEntropyLoss(), (CASES, OUTPUTS), torch.zeros(CASES, 2, dtype=torch.long)),
        (nn.CrossEntropyLoss(), (CASES, OUTPUTS), torch.zeros(CASES, 2)),
        (nn.MSELoss(), (CASES, OUTPUTS), torch.zeros(CASES, 1)),
        (nn.BCEWithLogitsLoss(), (CASES, OUTPUTS), torch.zeros(OUTPUTS)),
        (Gaussian(), (CASES, OUTPUTS), torch.zeros(1, OUTPUTS)),
    ],
)
def test_targets_that_do_not_fit_are_refused(loss, outputs, targets):
    with pytest.raises(TargetError, match="needs"):
        objective_of(loss).read(normal(*outputs), targets)


def test_arguments_that_torch_has_deprecated_are_refused():
    z = normal(CASES, OUTPUTS)
    with pytest.raises(UnsupportedLossError, match="'mean', 'sum' or 'none'; got 'all'"):
        READERS[functional.cross_entropy](z, INDICES, reduction="all")
    with pytest.raises(UnsupportedLossError, match="not size_average"):
        READERS[functional.mse_loss](z, GREY, size_average=False)


def test_total_weights():
    z = normal(CASES, OUTPUTS)
    mse, ce = READERS[functional.mse_loss], READERS[functional.cross_entropy]
    assert ce(z, IGNORED).total_weight == pytest.approx(1.0)
    assert ce(z, IGNORED, reduction="sum").total_weight == 3.0
    assert mse(z, GREY).total_weight == pytest.approx(1 / OUTPUTS)
    assert mse(z, GREY, reduction="sum").scaled(0.5).total_weight == CASES / 2


def test_a_selection_of_terms_keeps_their_weights_and_targets():
    terms = objective_of(nn.CrossEntropyLoss(weight=CLASSES)).read(normal(CASES, OUTPUTS), IGNORED)
    index = torch.tensor([2, 1])
    some = terms.select(index, torch.Size((2, OUTPUTS)))
    assert torch.equal(some.weight, terms.weight[index])
    assert torch.equal(some.targets, terms.targets[index])
    assert some.count == 2
