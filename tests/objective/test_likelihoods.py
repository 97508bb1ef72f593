"""Scores, Fishers and samples of the predictive distributions, against their definitions."""

import math

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from kronfac.errors import TargetError
from kronfac.objective import Bernoulli, Categorical, Gaussian
from tests.conftest import ALGEBRA, AUTODIFF, normal, seeded

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


@pytest.mark.parametrize(
    ("likelihood", "law"),
    [
        (Gaussian(), lambda z: torch.distributions.Normal(z, 1.0)),
        (Gaussian(0.3), lambda z: torch.distributions.Normal(z, 0.3**0.5)),
        (Bernoulli(), lambda z: torch.distributions.Bernoulli(logits=z)),
        (Categorical(), lambda z: torch.distributions.Categorical(logits=z)),
    ],
    ids=["gaussian", "gaussian_0.3", "bernoulli", "categorical"],
)
def test_the_loss_is_the_log_density_up_to_a_constant(likelihood, law):
    """So that differences between two outputs are the same."""
    z, other = normal(CASES, OUTPUTS), normal(CASES, OUTPUTS, seed=2)
    y = targets_of(str(likelihood).split("(", maxsplit=1)[0].lower())[0]
    if isinstance(likelihood, Bernoulli):
        y = y.round()
    found = likelihood.negative_log_likelihood(z, y) - likelihood.negative_log_likelihood(other, y)
    assert_close(found, (law(other).log_prob(y) - law(z).log_prob(y)).sum(), **ALGEBRA)


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


# ----------------------------------------------------------------------------------------- Fisher


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


@pytest.mark.parametrize("name", ["gaussian", "gaussian_0.3", "bernoulli", "categorical"])
def test_drawn_targets_have_their_mean_and_covariance(name):
    likelihood, settings = ALL[name]
    z = normal(2, OUTPUTS)
    y = draw(likelihood, z)
    mean, variance = z, settings.get("variance", 1.0)
    if name == "bernoulli":
        assert ((y == 0) | (y == 1)).all()
        mean = z.sigmoid()
        variance = mean * (1 - mean)
    if name == "categorical":
        y = functional.one_hot(y, OUTPUTS).double()
        mean = z.softmax(dim=1)
        variance = mean * (1 - mean)
    sigma = torch.as_tensor(variance, dtype=torch.float64).expand_as(mean).sqrt()
    centred = y - mean
    assert (centred.mean(0).abs() < SIGMAS * sigma / DRAWS**0.5).all()
    covariance = torch.einsum("nci,ncj->cij", centred, centred) / DRAWS
    expected = torch.diag_embed(sigma.square())
    if name == "categorical":
        expected = torch.diag_embed(mean) - mean.unsqueeze(2) * mean.unsqueeze(1)
    # Var(x²) = 2σ⁴ of a Gaussian bounds Var(xy) = σ⁴; other products are at most 1.
    bound = SIGMAS * (2 / DRAWS) ** 0.5 * sigma.amax(dim=1)[:, None, None] ** 2
    assert ((covariance - expected).abs() < bound).all()


def test_categorical_sampling_inverts_the_cumulative_distribution():
    p = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0], dtype=torch.float64)
    z = p.log().expand(5, -1)
    noise = torch.tensor([0.0, 0.2499, 0.2501, 0.7501, 1 - 2**-53], dtype=torch.float64)
    assert Categorical().sample(z, noise).tolist() == [1, 1, 2, 4, 4]


def test_categorical_sampling_takes_the_last_class_where_rounding_leaves_a_gap():
    z = torch.zeros(1, 3)  # three times 1/3 may sum to less than the largest float32 below 1
    assert Categorical().sample(z, torch.tensor([1.0])).tolist() == [2]


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
