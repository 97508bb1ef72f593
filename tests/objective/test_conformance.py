"""Every likelihood of the library through the conformance kit, and the kit against wrong ones."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.testing import assert_close

import kronfac
from kronfac.errors import ClosureError, TargetError, UnsupportedLossError
from kronfac.objective import BernoulliProbability
from kronfac.testing import check_likelihood
from tests.conftest import ALGEBRA, normal, seeded

Z = normal(5, 4, seed=1)
Y = normal(5, 4, seed=2)
CLASSES = torch.tensor([0, 2, 1, 1, 3])
PROBABILITIES = (2 * Z).sigmoid()
COUNTS = torch.poisson(Z.exp(), generator=seeded(3))
PAIRS = torch.cat((normal(5, 2), normal(5, 2, seed=1).exp()), dim=1)

DRAWN = {
    "gaussian": (kronfac.Gaussian(0.3), Z),
    "bernoulli": (kronfac.Bernoulli(), Z),
    "categorical": (kronfac.Categorical(), Z),
}
GIVEN = {
    "poisson of logarithms": (kronfac.Poisson(), Z, COUNTS),
    "poisson of rates": (kronfac.Poisson(log_input=False), Z.exp(), COUNTS),
    "poisson of rates with a large eps": (
        kronfac.Poisson(log_input=False, eps=0.3),
        Z.exp(),
        COUNTS,
    ),
    "probabilities": (BernoulliProbability(), PROBABILITIES, Z.sigmoid()),
    "mean and variance": (kronfac.HeteroscedasticGaussian(), PAIRS, Y[:, :2]),
    "variances below eps": (kronfac.HeteroscedasticGaussian(eps=0.9), PAIRS, Y[:, :2]),
    "grey levels": (kronfac.Bernoulli(), Z, PROBABILITIES),
    "smoothed labels": (kronfac.Categorical(0.2), Z, CLASSES),
    "soft labels": (kronfac.Categorical(), Z, Y.softmax(dim=1)),
    "soft labels that do not sum to one": (kronfac.Categorical(0.2), Z, 1.7 * Y.softmax(dim=1)),
    "huber": (kronfac.Huber(0.7), Z, Y),
    "huber with a factor": (kronfac.Huber(0.7, 1.4), Z, Y),
    "gauss-newton, elementwise": (kronfac.GaussNewton(nn.SoftMarginLoss()), Z, Y.sign()),
    "gauss-newton, sum": (kronfac.GaussNewton(nn.HuberLoss(reduction="sum")), Z, Y),
    "gauss-newton, outputs that meet": (
        kronfac.GaussNewton(nn.CrossEntropyLoss()),
        Z,
        CLASSES,
    ),
    "gauss-newton of a function": (
        kronfac.GaussNewton(lambda z, y: (z - y).square().sum(dim=1).add(1).sqrt().mean()),
        Z,
        Y,
    ),
}


@pytest.mark.parametrize("name", DRAWN)
def test_distributions_conform(name):
    check_likelihood(*DRAWN[name])


@pytest.mark.parametrize("name", GIVEN)
def test_likelihoods_at_given_targets_conform(name):
    likelihood, outputs, targets = GIVEN[name]
    check_likelihood(likelihood, outputs, targets=targets)


class Meeting(kronfac.Gaussian):
    def score(self, outputs, targets):
        return super().score(outputs, targets) * len(outputs) / 5


class Doubled(kronfac.Bernoulli):
    def fisher_diagonal(self, outputs):
        return 2 * super().fisher_diagonal(outputs)


@pytest.mark.parametrize(("wrong", "outputs"), [(Meeting(), Z), (Doubled(), Z)])
def test_the_kit_finds_what_is_wrong(wrong, outputs):
    with pytest.raises(AssertionError):
        check_likelihood(wrong, outputs)


# --------------------------------------------------------------------------------------- by definition


def test_the_curvature_of_a_huber_loss_majorises_it():
    """ρ(r + d) ≤ ρ(r) + ρ'(r) d + ½ w d² for all d, with equality at d = −2r if |r| ≥ δ."""
    r = torch.linspace(-4, 4, 41, dtype=torch.float64)
    d = torch.linspace(-9, 9, 301, dtype=torch.float64)[:, None]
    likelihood = kronfac.Huber(0.8).given(torch.zeros_like(r))
    rho = lambda x: functional.huber_loss(x, torch.zeros_like(x), delta=0.8, reduction="none")  # noqa: E731
    slope, w = likelihood.score(r, torch.zeros_like(r)), likelihood.fisher_diagonal(r)
    bound = rho(r) + slope * d + w * d.square() / 2
    assert (rho(r + d) <= bound + 1e-12).all()
    touching = rho(r) + slope * (-2 * r) + w * (2 * r).square() / 2
    outside = r.abs() >= 0.8
    assert_close(touching[outside], rho(-r)[outside], **ALGEBRA)


def test_gauss_newton_leaves_out_negative_curvature():
    likelihood = kronfac.GaussNewton(lambda z, y: (z - y).cos().sum(dim=1).mean()).given(Y)
    H = -(Z - Y).cos()
    assert (H < 0).any()
    v = normal(5, 4, seed=5)
    assert_close(likelihood.fisher_product(Z, v), H.clamp(min=0) * v, **ALGEBRA)


def test_gauss_newton_of_a_linear_loss_is_zero():
    likelihood = kronfac.GaussNewton(lambda z, y: (z * y).mean()).given(Y)
    assert not likelihood.fisher_product(Z, normal(5, 4)).any()


def test_gauss_newton_of_outputs_that_are_not_finite_is_not_finite():
    likelihood = kronfac.GaussNewton(nn.CrossEntropyLoss()).given(CLASSES)
    assert not likelihood.fisher_product(Z * float("inf"), Z).isfinite().all()


def test_saturated_probabilities_have_a_finite_curvature():
    z = torch.tensor([[0.0, 1.0, 0.5]])
    likelihood = BernoulliProbability()
    assert likelihood.fisher_product(z, torch.ones_like(z)).isfinite().all()
    assert likelihood.score(z, 1 - z).isfinite().all()


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "make",
    [
        lambda: kronfac.Poisson(eps=0.0),
        lambda: kronfac.Huber(0.0),
        lambda: kronfac.Huber(1.0, -1.0),
        lambda: kronfac.HeteroscedasticGaussian(eps=float("nan")),
    ],
)
def test_numbers_that_are_none_are_refused(make):
    with pytest.raises(ValueError, match="needs a positive"):
        make()


def test_likelihoods_that_draw_scores_draw_no_targets():
    for likelihood in (kronfac.Huber(), kronfac.Poisson(), kronfac.GaussNewton(nn.L1Loss())):
        with pytest.raises(TypeError, match="draws scores and no targets"):
            likelihood.sample(Z, Z)


def test_gauss_newton_refuses_a_loss_that_is_no_scalar():
    with pytest.raises(UnsupportedLossError, match="got 'none'"):
        kronfac.GaussNewton(nn.HuberLoss(reduction="none"))
    with pytest.raises(UnsupportedLossError, match=r"a scalar; got the shape \(5, 4\)"):
        kronfac.GaussNewton(lambda z, y: z - y).negative_log_likelihood(Z, Y)


def test_gauss_newton_refuses_targets_that_do_not_fit():
    with pytest.raises(TargetError, match="the terms as their first dimension"):
        kronfac.GaussNewton(nn.HuberLoss())(Z, Y[:2])


def test_gauss_newton_refuses_a_loss_that_is_no_mean_over_its_terms():
    def divided(z, y):
        return functional.cross_entropy(z, y, ignore_index=1)

    with pytest.raises(UnsupportedLossError, match="a mean over its terms"):
        kronfac.GaussNewton(divided).check_terms(Z, CLASSES)

    def summed(z, y):
        return functional.huber_loss(z, y, reduction="sum")

    with pytest.raises(UnsupportedLossError, match="If it is a sum, pass reduction="):
        kronfac.GaussNewton(summed).check_terms(Z, Y)
    kronfac.GaussNewton(summed, reduction="sum").check_terms(Z, Y)


@pytest.mark.parametrize("loss", [nn.KLDivLoss(reduction="batchmean"), nn.L1Loss()])
def test_gauss_newton_warns_of_a_loss_without_curvature(loss):
    with pytest.warns(UserWarning, match="0 at all outputs"):
        kronfac.GaussNewton(loss).check_terms(Z.log_softmax(dim=1), Y.softmax(dim=1))


def test_gauss_newton_without_targets_is_refused():
    with pytest.raises(ClosureError, match="depends on the targets"):
        kronfac.objective.objective_of(kronfac.GaussNewton(nn.HuberLoss())).declare(Z.shape)


@pytest.mark.parametrize(
    ("outputs", "targets"), [((4, 3), (4, 3)), ((4, 6), (4, 6)), ((4, 2, 3), (4, 3)), ((4,), (4,))]
)
def test_mean_and_variance_need_outputs_and_targets_that_fit(outputs, targets):
    with pytest.raises(TargetError, match="HeteroscedasticGaussian needs"):
        kronfac.HeteroscedasticGaussian()(torch.ones(outputs), torch.ones(targets))
