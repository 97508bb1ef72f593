"""Loss calls as terms: the Hessian of the loss in its outputs is diag(s w_t F_R(z_t)), and nothing else."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.testing import assert_close

from kronfac.errors import TargetError, UnsupportedLossError
from kronfac.objective import Categorical, Gaussian
from kronfac.objective.likelihoods import likelihood_loss
from kronfac.objective.losses import READERS
from tests.conftest import ALGEBRA, AUTODIFF, normal, seeded
from tests.reference import dense

N, C, T = 4, 3, 5
GREY = torch.rand(N, C, generator=seeded(1), dtype=torch.float64)
CLASSES = torch.tensor([0, 2, 1, 1])
SOFT = normal(N, C, seed=2).softmax(dim=1)
PIXELS = torch.randint(C, (N, T), generator=seeded(3))
CLASS_WEIGHT = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
IGNORED = torch.tensor([0, -100, 1, 1])
mse, bce, ce = (
    functional.mse_loss,
    functional.binary_cross_entropy_with_logits,
    functional.cross_entropy,
)

CALLS = {
    "mse": (mse, (N, C), GREY, {}),
    "mse_sum": (mse, (N, C), GREY, {"reduction": "sum"}),
    "mse_vector": (mse, (N,), GREY[:, 0], {}),
    "mse_images": (mse, (N, 2, 3), normal(N, 2, 3, seed=8), {}),
    "mse_weight": (mse, (N, C), GREY, {"weight": GREY + 0.1}),
    "mse_weight_sum": (mse, (N, C), GREY, {"weight": GREY + 0.1, "reduction": "sum"}),
    "bce": (bce, (N, C), GREY, {}),
    "bce_weight": (bce, (N, C), GREY, {"weight": CLASS_WEIGHT}),
    "bce_pos_weight": (bce, (N, C), GREY, {"pos_weight": CLASS_WEIGHT, "reduction": "sum"}),
    "ce": (ce, (N, C), CLASSES, {}),
    "ce_sum": (ce, (N, C), CLASSES, {"reduction": "sum"}),
    "ce_one": (ce, (C,), torch.tensor(1), {}),
    "ce_pixels": (ce, (N, C, T), PIXELS, {}),
    "ce_soft": (ce, (N, C), SOFT, {}),
    "ce_soft_pixels": (ce, (N, C, T), normal(N, C, T, seed=5).softmax(dim=1), {}),
    "ce_soft_weight": (ce, (N, C), SOFT, {"weight": CLASS_WEIGHT, "label_smoothing": 0.2}),
    "ce_weight": (ce, (N, C), CLASSES, {"weight": CLASS_WEIGHT}),
    "ce_weight_smooth": (ce, (N, C), CLASSES, {"weight": CLASS_WEIGHT, "label_smoothing": 0.2}),
    "ce_smooth": (ce, (N, C), IGNORED, {"label_smoothing": 0.2}),
    "ce_ignored": (ce, (N, C), IGNORED, {}),
    "ce_ignored_sum": (ce, (N, C), CLASSES, {"ignore_index": 1, "reduction": "sum"}),
    "ce_ignored_weight": (ce, (N, C), IGNORED, {"weight": CLASS_WEIGHT}),
}


def output_fisher(terms, z: Tensor) -> Tensor:
    """F_R of every term, (terms, event, event)."""
    kind = type(terms.likelihood).__name__.lower()
    return dense.output_fisher(z, kind, getattr(terms.likelihood, "variance", 1.0))


def hessian_by_term(loss, terms, z: Tensor) -> Tensor:
    """∂²loss/∂z² with rows and columns in the order (term, output)."""
    positions = terms.matrix(torch.arange(z.numel()).reshape(z.shape)).reshape(-1)
    flat = torch.func.hessian(lambda v: loss(v.reshape(z.shape)))(z.reshape(-1))
    return flat[positions][:, positions]


@pytest.mark.parametrize("call", CALLS)
def test_the_curvature_of_a_loss_call_is_that_of_its_terms(call):
    function, shape, target, options = CALLS[call]
    z = normal(*shape, seed=7)
    terms = READERS[function](z, target, **options)
    count, event = terms.count, terms.event
    assert count * event == z.numel()
    vectors = torch.eye(count * event, dtype=z.dtype).reshape(-1, count, event)
    F_R = output_fisher(terms, terms.matrix(z))
    products = terms.weigh(torch.einsum("tij,ktj->kti", F_R, vectors))
    expected = hessian_by_term(lambda v: function(v, target, **options), terms, z)
    assert_close(products.reshape(len(vectors), -1), expected, **AUTODIFF)


@pytest.mark.parametrize("call", CALLS)
def test_a_score_weighed_by_the_root_stands_for_the_curvature(call):
    function, shape, target, options = CALLS[call]
    z = normal(*shape, seed=7)
    terms = READERS[function](z, target, **options)
    rows = terms.matrix(z)
    total = torch.zeros(terms.count, terms.event, terms.event, dtype=z.dtype)
    for column in terms.likelihood.fisher_root_columns(rows):
        r = terms.weigh_by_root(column, scale=0.3)
        total += torch.einsum("ti,tj->tij", r, r)
    expected = output_fisher(terms, rows)
    if terms.weight is None or terms.weight.dim() == 1:
        weight = z.new_ones(terms.count) if terms.weight is None else terms.weight
        expected = expected * (terms.scale * weight)[:, None, None]
    else:  # only where outputs are independent
        expected = expected * (terms.scale * terms.weight)[:, None, :]
    assert_close(0.3 * total, expected, **ALGEBRA)


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), Categorical(0.1)])
def test_a_likelihood_called_as_a_loss_is_a_mean_over_terms(likelihood):
    z = normal(N, C, seed=7)
    target = CLASSES if isinstance(likelihood, Categorical) else GREY
    terms = READERS[likelihood_loss](likelihood, z, target)
    assert terms.likelihood is likelihood
    assert terms.total_weight == pytest.approx(1.0)
    expected = hessian_by_term(lambda v: likelihood(v, target), terms, z)
    F_R = output_fisher(terms, z)
    assert_close(expected, torch.block_diag(*(F_R / N)), **AUTODIFF)


def test_total_weights():
    z = normal(N, C, seed=7)
    assert READERS[ce](z, IGNORED).total_weight == pytest.approx(1.0)
    assert READERS[ce](z, IGNORED, reduction="sum").total_weight == 3.0
    assert READERS[mse](z, GREY).total_weight == pytest.approx(1 / C)
    assert READERS[mse](z, GREY, reduction="sum").scaled(0.5).total_weight == N / 2
    assert READERS[mse](z, GREY).scaled(torch.tensor(3.0)).total_weight == pytest.approx(3 / C)


def test_a_selection_of_terms_keeps_their_weights_and_targets():
    z = normal(N, C, seed=7)
    terms, index = READERS[ce](z, IGNORED, weight=CLASS_WEIGHT), torch.tensor([2, 1])
    some = terms.select(index, torch.Size((2, C)))
    assert_close(some.weight, terms.weight[index])
    assert_close(some.targets, terms.targets[index])
    assert some.count == 2


def test_tangents_keep_their_first_dimension():
    terms = READERS[ce](normal(N, C, T, seed=7), PIXELS)
    tangents = normal(2, N, C, T, seed=1)
    for tangent, rows in zip(tangents, terms.matrix(tangents), strict=True):
        assert_close(rows, terms.matrix(tangent))


def test_calls_that_do_not_fit_are_refused():
    z = normal(N, C, seed=7)
    with pytest.raises(
        TargetError, match=r"needs targets of the outputs' shape \(4, 3\); got \(4,\)"
    ):
        READERS[mse](z, GREY[:, 0])
    with pytest.raises(TargetError, match="class indices of shape"):
        READERS[ce](z, CLASSES[:2])
    with pytest.raises(UnsupportedLossError, match="'mean', 'sum' or 'none'; got 'all'"):
        READERS[ce](z, CLASSES, reduction="all")
    with pytest.raises(UnsupportedLossError, match="not size_average"):
        READERS[mse](z, GREY, size_average=False)
