"""Loss modules as likelihoods with terms, weights and a scale."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac.errors import TargetError, UnsupportedLossError
from kronfac.objective import READERS, Bernoulli, Categorical, Gaussian, Terms, objective_of
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


def hessian_of(terms: Terms, z: torch.Tensor) -> torch.Tensor:
    """The curvature that the terms stand for, (outputs of all terms)², a column at a time."""
    rows = terms.matrix(z)
    columns = []
    for i in range(rows.numel()):
        e = torch.zeros(rows.numel(), dtype=torch.float64)
        e[i] = 1
        product = terms.likelihood.fisher_product(rows, e.reshape(rows.shape))
        columns.append(terms.weigh(product).reshape(-1))
    return torch.stack(columns, dim=1)


def dense_hessian(loss, z: torch.Tensor, targets, terms: Terms) -> torch.Tensor:
    """∂²loss/∂z² in the layout of the terms."""
    shape = z.shape

    def of_rows(rows: torch.Tensor) -> torch.Tensor:
        if not terms.channels:
            return loss(rows.reshape(shape), targets)
        if len(shape) == 1:
            return loss(rows, targets)
        moved = torch.Size((shape[0], *shape[2:], shape[1]))
        return loss(rows.reshape(moved).movedim(-1, 1), targets)

    return torch.func.hessian(of_rows)(terms.matrix(z).reshape(-1))


@each_loss
def test_terms_have_the_hessian_of_the_module(loss, targets, kind):
    """∂²loss/∂z² = s diag(w₁ F_R of term 1, w₂ F_R of term 2, …): no curvature between terms."""
    objective = objective_of(loss)
    assert isinstance(objective.likelihood, kind)
    z = normal(CASES, OUTPUTS)
    terms = objective.read(z, targets)
    assert (terms.count, terms.event) == (CASES, OUTPUTS)
    assert terms.weight is None
    assert_close(hessian_of(terms, z), dense_hessian(loss, z, targets, terms), **AUTODIFF)
    variance = getattr(objective.likelihood, "variance", 1.0)
    F_R = dense.output_fisher(z, kind.__name__.lower(), variance)
    expected = torch.block_diag(*(terms.scale * F for F in F_R))
    assert_close(hessian_of(terms, z), expected, **ALGEBRA)


@each_loss
def test_terms_have_the_gradient_of_the_module(loss, targets, kind):
    """s Σ w ∂(−log r)/∂z."""
    z = normal(CASES, OUTPUTS).requires_grad_()
    terms = objective_of(loss).read(z.detach(), targets)
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
PIXELS = torch.tensor([[0, 2], [1, 1], [-100, 0], [2, 2]])
ELEMENTS = torch.rand(CASES, OUTPUTS, generator=seeded(5), dtype=torch.float64)

WEIGHTED = {
    "ignored targets": (nn.CrossEntropyLoss(), (CASES, OUTPUTS), IGNORED),
    "ignored targets, summed": (nn.CrossEntropyLoss(reduction="sum"), (CASES, OUTPUTS), IGNORED),
    "another ignore_index": (nn.CrossEntropyLoss(ignore_index=1), (CASES, OUTPUTS), INDICES),
    "class weights": (nn.CrossEntropyLoss(weight=CLASSES), (CASES, OUTPUTS), INDICES),
    "class weights, summed": (
        nn.CrossEntropyLoss(weight=CLASSES, reduction="sum"),
        (CASES, OUTPUTS),
        IGNORED,
    ),
    "class weights, smoothed": (
        nn.CrossEntropyLoss(weight=CLASSES, label_smoothing=0.3),
        (CASES, OUTPUTS),
        IGNORED,
    ),
    "class weights, soft targets": (
        nn.CrossEntropyLoss(weight=CLASSES, label_smoothing=0.3),
        (CASES, OUTPUTS),
        SOFT,
    ),
    "pixels": (nn.CrossEntropyLoss(weight=CLASSES), (CASES, OUTPUTS, 2), PIXELS),
    "pixels, all counted": (nn.CrossEntropyLoss(), (CASES, OUTPUTS, 2), PIXELS.clamp(min=0)),
    "one example without a batch": (nn.CrossEntropyLoss(), (OUTPUTS,), torch.tensor(1)),
    "element weights": (nn.BCEWithLogitsLoss(weight=ELEMENTS), (CASES, OUTPUTS), GREY),
    "weights of the outputs": (nn.BCEWithLogitsLoss(weight=ELEMENTS[0]), (CASES, OUTPUTS), GREY),
    "positive weights": (nn.BCEWithLogitsLoss(pos_weight=CLASSES), (CASES, OUTPUTS), GREY),
    "both": (
        nn.BCEWithLogitsLoss(weight=ELEMENTS, pos_weight=CLASSES, reduction="sum"),
        (CASES, OUTPUTS),
        GREY,
    ),
    "smoothed, all counted": (
        nn.CrossEntropyLoss(weight=CLASSES, label_smoothing=0.3),
        (CASES, OUTPUTS),
        INDICES,
    ),
    "smoothed and ignored": (nn.CrossEntropyLoss(label_smoothing=0.2), (CASES, OUTPUTS), IGNORED),
    "class weights and ignored": (nn.CrossEntropyLoss(weight=CLASSES), (CASES, OUTPUTS), IGNORED),
    "another ignore_index, summed": (
        nn.CrossEntropyLoss(ignore_index=1, reduction="sum"),
        (CASES, OUTPUTS),
        INDICES,
    ),
    "pixels, soft targets": (
        nn.CrossEntropyLoss(),
        (CASES, OUTPUTS, 2),
        normal(CASES, OUTPUTS, 2, seed=5).softmax(dim=1),
    ),
    "more dimensions": (nn.MSELoss(), (CASES, 2, 3), normal(CASES, 2, 3, seed=3)),
    "one output without a dimension": (nn.MSELoss(), (CASES,), normal(CASES, seed=3)),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_are_part_of_the_terms(name):
    """The curvature is the Hessian of the module, whatever weighs its terms."""
    loss, shape, targets = WEIGHTED[name]
    z = normal(*shape)
    terms = objective_of(loss).read(z, targets)
    assert_close(hessian_of(terms, z), dense_hessian(loss, z, targets, terms), **AUTODIFF)


@pytest.mark.parametrize("name", WEIGHTED)
def test_tangents_keep_their_first_dimension(name):
    loss, shape, targets = WEIGHTED[name]
    tangents = normal(2, *shape)
    terms = objective_of(loss).read(tangents[0], targets)
    expected = torch.stack([terms.matrix(tangent) for tangent in tangents])
    assert expected.shape == (2, terms.count, terms.event)
    assert torch.equal(terms.matrix(tangents), expected)


@pytest.mark.parametrize("name", WEIGHTED)
def test_roots_of_the_weights_make_second_moments_of_them(name):
    """Σ_j r_j r_jᵀ = s w F_R for r_j = √(s w) ⊙ (column j of a root of F_R)."""
    loss, shape, targets = WEIGHTED[name]
    z = normal(*shape)
    terms = objective_of(loss).read(z, targets)
    rows = terms.matrix(z)
    moment = torch.zeros(terms.count, terms.event, terms.event, dtype=torch.float64)
    for column in terms.likelihood.fisher_root_columns(rows):
        r = terms.weigh_by_root(column)
        moment += r.unsqueeze(2) * r.unsqueeze(1)
    assert_close(torch.block_diag(*moment), hessian_of(terms, z), **ALGEBRA)


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("factor", [3.0, torch.tensor(3.0, dtype=torch.float64)], ids=str)
def test_a_factor_scales_the_terms(name, factor):
    loss, shape, targets = WEIGHTED[name]
    z = normal(*shape)
    terms = objective_of(loss).read(z, targets)
    assert_close(hessian_of(terms.scaled(factor), z), 3 * hessian_of(terms, z), **ALGEBRA)
    assert terms.scaled(factor).total_weight == pytest.approx(3 * terms.total_weight)


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
