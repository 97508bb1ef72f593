"""Scores, Fishers and samples of the predictive distributions, against their definitions."""

import itertools
import math

import pytest
import torch
from torch.testing import assert_close

from kronfac.errors import TargetError
from kronfac.objective import Bernoulli, Categorical, Gaussian
from tests.conftest import ALGEBRA, AUTODIFF, normal, seeded
from tests.reference import dense

CASES, OUTPUTS = 5, 3
ALL = {
    "gaussian": (Gaussian(), {}),
    "gaussian_0.3": (Gaussian(variance=0.3), {"variance": 0.3}),
    "bernoulli": (Bernoulli(), {}),
    "categorical": (Categorical(), {}),
    "categorical_smooth": (Categorical(label_smoothing=0.2), {}),
}


def kind(name: str) -> str:
    return name.split("_", maxsplit=1)[0]


def every_target(name: str, z: torch.Tensor):
    """All targets of one case with their probabilities, (targets…) and (…)."""
    if kind(name) == "bernoulli":
        p = 1 / (1 + torch.exp(-z))
        for bits in itertools.product([0.0, 1.0], repeat=len(z)):
            y = torch.tensor(bits, dtype=z.dtype)
            yield y, torch.prod(torch.where(y > 0, p, 1 - p))
    else:
        weights = torch.exp(z)
        for k in range(len(z)):
            yield torch.tensor(k), weights[k] / weights.sum()


def soft_targets() -> torch.Tensor:
    return normal(CASES, OUTPUTS, seed=4).softmax(dim=1)


def targets_of(name: str) -> list[torch.Tensor]:
    if kind(name) == "gaussian":
        return [normal(CASES, OUTPUTS, seed=1)]
    if kind(name) == "bernoulli":
        grey = torch.rand(CASES, OUTPUTS, generator=seeded(1), dtype=torch.float64)
        return [grey, (grey > 0.5).double()]
    return [torch.tensor([0, 2, 1, 1, 0]), soft_targets(), 1.7 * soft_targets()]


# ------------------------------------------------------------------------------ negative log-likelihood


@pytest.mark.parametrize("variance", [1.0, 0.3])
def test_gaussian_loss_is_the_log_density_up_to_a_constant(variance):
    z, y = normal(CASES, OUTPUTS), normal(CASES, OUTPUTS, seed=1)
    log_density = torch.distributions.Normal(z, variance**0.5).log_prob(y).sum()
    constant = CASES * OUTPUTS * 0.5 * math.log(2 * math.pi * variance)
    actual = Gaussian(variance).negative_log_likelihood(z, y)
    assert_close(actual, -log_density - constant, **ALGEBRA)


def test_bernoulli_loss_is_the_log_probability():
    z, y = normal(CASES, OUTPUTS), (normal(CASES, OUTPUTS, seed=1) > 0).double()
    expected = -torch.distributions.Bernoulli(logits=z).log_prob(y).sum()
    assert_close(Bernoulli().negative_log_likelihood(z, y), expected, **ALGEBRA)


def test_categorical_loss_is_the_log_probability():
    z, y = normal(CASES, OUTPUTS), torch.tensor([0, 2, 1, 1, 0])
    expected = -torch.distributions.Categorical(logits=z).log_prob(y).sum()
    assert_close(Categorical().negative_log_likelihood(z, y), expected, **ALGEBRA)


def test_label_smoothing_mixes_the_target_with_the_uniform_distribution():
    z, y = normal(CASES, OUTPUTS), torch.tensor([0, 2, 1, 1, 0])
    q = 0.8 * torch.eye(OUTPUTS, dtype=z.dtype)[y] + 0.2 / OUTPUTS
    expected = -(q * (z - z.logsumexp(dim=1, keepdim=True))).sum()
    assert_close(Categorical(0.2).negative_log_likelihood(z, y), expected, **ALGEBRA)


@pytest.mark.parametrize("name", ALL)
def test_called_as_a_loss_it_is_the_mean_over_cases(name):
    likelihood, _ = ALL[name]
    z, y = normal(CASES, OUTPUTS), targets_of(name)[0]
    one_by_one = [likelihood.negative_log_likelihood(z[i : i + 1], y[i : i + 1]) for i in range(5)]
    assert_close(likelihood(z, y), torch.stack(one_by_one).mean(), **ALGEBRA)


# ------------------------------------------------------------------------------------------ score


@pytest.mark.parametrize("name", ALL)
def test_score_is_the_gradient_of_the_loss(name):
    likelihood, _ = ALL[name]
    for y in targets_of(name):
        z = normal(CASES, OUTPUTS).requires_grad_()
        (expected,) = torch.autograd.grad(likelihood.negative_log_likelihood(z, y), z)
        assert_close(likelihood.score(z.detach(), y), expected, **AUTODIFF)


# ----------------------------------------------------------------------------------------- Fisher


@pytest.mark.parametrize("name", ["bernoulli", "categorical"])
def test_fisher_product_is_the_second_moment_of_the_score_over_all_targets(name):
    likelihood, _ = ALL[name]
    z = normal(CASES, OUTPUTS)
    vectors = normal(2, CASES, OUTPUTS, seed=3)
    products = likelihood.fisher_product(z, vectors)
    for i in range(CASES):
        F = torch.zeros(OUTPUTS, OUTPUTS, dtype=torch.float64)
        for y, probability in every_target(name, z[i]):
            score = likelihood.score(z[i : i + 1], y[None])[0]
            F += probability * torch.outer(score, score)
        for k in range(2):
            assert_close(products[k, i], F @ vectors[k, i], **ALGEBRA)


@pytest.mark.parametrize("name", ALL)
def test_fisher_product_is_the_hessian_of_the_loss_times_the_vector(name):
    """In natural parameters the Hessian does not depend on y [MG15 §6.1]."""
    likelihood, _ = ALL[name]
    z, v = normal(CASES, OUTPUTS), normal(CASES, OUTPUTS, seed=3)
    for y in targets_of(name)[:2]:
        for i in range(CASES):
            hessian = torch.func.hessian(
                lambda z, y=y[i : i + 1]: likelihood.negative_log_likelihood(z[None], y)
            )(z[i])
            assert_close(likelihood.fisher_product(z, v)[i], hessian @ v[i], **AUTODIFF)


@pytest.mark.parametrize("name", ALL)
def test_root_columns_make_up_the_fisher(name):
    likelihood, settings = ALL[name]
    z = normal(CASES, OUTPUTS)
    total = sum(
        column.unsqueeze(2) * column.unsqueeze(1) for column in likelihood.fisher_root_columns(z)
    )
    assert_close(total, dense.output_fisher(z, kind(name), **settings), **ALGEBRA)
    basis = torch.eye(OUTPUTS, dtype=z.dtype).unsqueeze(1).expand(-1, CASES, -1)
    product = likelihood.fisher_product(z, basis).permute(1, 2, 0)  # (cases, outputs, outputs)
    assert_close(product, total, **ALGEBRA)


@pytest.mark.parametrize("name", ["bernoulli", "categorical"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_outputs_stay_finite(name, dtype):
    likelihood, _ = ALL[name]
    z = torch.tensor([[1e4, -1e4, 0.0], [-200.0, 200.0, 150.0]], dtype=dtype)
    y = torch.tensor([2, 0]) if name == "categorical" else torch.ones_like(z)
    assert likelihood.negative_log_likelihood(z, y).isfinite()
    assert likelihood.score(z, y).isfinite().all()
    assert likelihood.fisher_product(z, torch.ones_like(z)).isfinite().all()
    assert all(column.isfinite().all() for column in likelihood.fisher_root_columns(z))


# --------------------------------------------------------------------------------------- sampling

DRAWS = 40_000
SIGMAS = 5.0  # of two dozen means, one is outside by chance with probability 1.4e-5


def draw(likelihood, z):
    noise = likelihood.noise(DRAWS, z.shape, z, seeded(7))
    assert len(noise) == DRAWS
    return torch.stack([likelihood.sample(z, n) for n in noise])


def test_bernoulli_frequencies():
    z = normal(2, OUTPUTS)
    p = 1 / (1 + torch.exp(-z))
    y = draw(Bernoulli(), z)
    assert ((y == 0) | (y == 1)).all()
    error = (p * (1 - p) / DRAWS).sqrt()
    assert ((y.mean(0) - p).abs() < SIGMAS * error).all()
    # Outputs are independent: the covariance of two has variance p(1−p)q(1−q)/N.
    centred = y - p
    for i, j in itertools.combinations(range(OUTPUTS), 2):
        bound = SIGMAS * error[:, i] * error[:, j] * DRAWS**0.5
        assert ((centred[..., i] * centred[..., j]).mean(0).abs() < bound).all()


def test_categorical_frequencies():
    z = normal(2, 4)
    p = torch.exp(z) / torch.exp(z).sum(1, keepdim=True)
    y = draw(Categorical(), z)
    frequency = torch.stack([(y == k).double().mean(0) for k in range(4)], dim=1)
    assert ((frequency - p).abs() < SIGMAS * (p * (1 - p) / DRAWS).sqrt()).all()


@pytest.mark.parametrize("variance", [1.0, 0.3])
def test_gaussian_moments(variance):
    z = normal(2, OUTPUTS)
    centred = draw(Gaussian(variance), z) - z
    assert (centred.mean(0).abs() < SIGMAS * (variance / DRAWS) ** 0.5).all()
    second = torch.einsum("nci,ncj->cij", centred, centred) / DRAWS
    expected = variance * torch.eye(OUTPUTS, dtype=z.dtype)
    # Var(x²) = 2σ⁴ bounds Var(xy) = σ⁴.
    assert ((second - expected).abs() < SIGMAS * variance * (2 / DRAWS) ** 0.5).all()


def test_categorical_sampling_inverts_the_cumulative_distribution():
    p = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0], dtype=torch.float64)
    z = p.log().expand(5, -1)
    noise = torch.tensor([0.0, 0.2499, 0.2501, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert Categorical().sample(z, noise).tolist() == [1, 1, 2, 4, 4]


def test_categorical_sampling_takes_the_last_class_where_rounding_leaves_a_gap():
    z = torch.zeros(1, 3)  # three times 1/3 may sum to less than the largest float32 below 1
    assert Categorical().sample(z, torch.tensor([1.0])).tolist() == [2]


@pytest.mark.parametrize("name", ALL)
def test_noise_is_one_number_a_case_and_draw_whatever_the_chunks(name):
    """The i-th case's noise does not depend on how many rows are looked at together."""
    likelihood, _ = ALL[name]
    z = normal(6, OUTPUTS)
    noise = likelihood.noise(2, z.shape, z, seeded(3))
    together = likelihood.sample(z, noise[1])
    apart = torch.cat(
        [likelihood.sample(z[:4], noise[1, :4]), likelihood.sample(z[4:], noise[1, 4:])]
    )
    assert torch.equal(together, apart)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("likelihood", [Gaussian(), Bernoulli()])
@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 3), (3, 4)])
def test_targets_that_torch_would_broadcast_are_refused(likelihood, shape):
    with pytest.raises(TargetError, match="outputs' shape"):
        likelihood(torch.zeros(4, 3), torch.zeros(shape))


@pytest.mark.parametrize(
    ("outputs", "targets"),
    [
        (torch.zeros(4, 3), torch.zeros(4)),  # floating indices
        (torch.zeros(4, 3), torch.zeros(4, 3, dtype=torch.long)),
        (torch.zeros(4, 3), torch.zeros(3, dtype=torch.long)),
        (torch.zeros(4, 3), torch.zeros(4, 2)),
        (torch.zeros(4, 3, 2), torch.zeros(4, 2, dtype=torch.long)),
        (torch.zeros(3), torch.zeros((), dtype=torch.long)),
    ],
)
def test_categorical_refuses_targets_that_do_not_fit(outputs, targets):
    with pytest.raises(TargetError, match="Categorical needs class indices"):
        Categorical()(outputs, targets)


@pytest.mark.parametrize("variance", [0.0, -1.0, math.inf, math.nan])
def test_gaussian_refuses_a_variance_that_is_none(variance):
    with pytest.raises(ValueError, match="positive variance"):
        Gaussian(variance)


@pytest.mark.parametrize("smoothing", [-0.1, 1.1, math.nan])
def test_categorical_refuses_a_smoothing_that_is_no_fraction(smoothing):
    with pytest.raises(ValueError, match="label_smoothing"):
        Categorical(smoothing)


@pytest.mark.parametrize("scale", [1.0, 1e10])
@pytest.mark.parametrize("variance", [1.0, 0.3])
def test_the_sampled_score_of_a_gaussian_keeps_its_digits_at_large_outputs(scale, variance):
    likelihood, z = Gaussian(variance=variance), scale * normal(CASES, OUTPUTS)
    noise = likelihood.noise(1, z.shape, z, seeded(2))[0]
    truth = likelihood.score(0 * z, likelihood.sample(0 * z, noise))  # it does not depend on z
    score = likelihood.sampled_score(z.float(), noise.float())
    assert_close(score.double(), truth, rtol=1e-6, atol=0)
