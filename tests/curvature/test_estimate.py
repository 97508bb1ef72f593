"""Ā and G against the dense moments, for every Fisher."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.curvature import (
    Curvature,
    DiagonalMoments,
    EmpiricalFisher,
    ExactFisher,
    Fisher,
    SampledFisher,
)
from kronfac.curvature.estimate import Sample, estimate
from kronfac.linearize import linearize
from kronfac.model import Network
from kronfac.objective import Categorical, Gaussian
from kronfac.record import Batch, record
from kronfac.storage import tensors_in
from tests.conftest import (
    ACTIVATIONS,
    ALGEBRA,
    AUTODIFF,
    LIKELIHOODS,
    batch,
    mlp,
    network_of,
    normal,
    passes_either_way,
    random_targets,
    seeded,
)
from tests.reference import dense

WIDTHS = [4, 5, 3, 2]
CASES = 12

passes = passes_either_way()


@torch.no_grad()  # as in `KFAC.step`
def estimate_on(network: Network, rows: Batch, fisher: Fisher, generator=None, **more) -> Curvature:
    sample = Sample(rows.passes, partial(linearize, network), more.pop("factor", 1.0))
    blocks = [unit.block for unit in network.units]
    return estimate(sample, blocks, fisher, generator or seeded(), **more)


def curvature_of(
    model,
    loss,
    x,
    fisher: Fisher,
    targets=None,
    chunk=None,
    generator=None,
    neighbours=True,
    factor=1.0,
    old=None,
    decay=0.0,
) -> Curvature:
    """The curvature of a chain of layers on the examples x."""
    network = network_of(model, loss)
    rows = batch(network, x, targets, chunk)
    links = [True] * (len(network.units) - 1) if neighbours else []
    return estimate_on(
        network, rows, fisher, generator, links=links, factor=factor, old=old, decay=decay
    )


def assert_moments(curvature, A, G, **tolerance):
    """Blocks and links are the diagonal and the next-to-diagonal blocks of the dense moments."""
    count = len(A)
    assert len(curvature.blocks) == count
    assert len(curvature.links) == count - 1
    for i, block in enumerate(curvature.blocks):
        assert_close(block.A, A[i][i], **tolerance)
        assert_close(block.G, G[i][i], **tolerance)
    for i, link in enumerate(curvature.links):
        assert_close(link.A_next, A[i][i + 1], **tolerance)
        assert_close(link.G_next, G[i][i + 1], **tolerance)


# ------------------------------------------------------------------------------------------ exact


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_exact_fisher(likelihood, activation, bias):
    model, x = mlp(WIDTHS, activation, bias), normal(CASES, 4)
    factors = curvature_of(model, LIKELIHOODS[likelihood](), x, ExactFisher())
    assert_moments(factors, *dense.moments(model, x, likelihood), **ALGEBRA)


def test_a_factor_scales_the_gradient_factors():
    """As that of S′ over S₁ does, if the loss is a sum over S′."""
    model, x = mlp(WIDTHS), normal(CASES, 4)
    factors = curvature_of(model, Gaussian(variance=0.3), x, ExactFisher(), factor=2.5)
    A, G = dense.moments(model, x, "gaussian", variance=0.3, scale=2.5)
    assert_moments(factors, A, G, **ALGEBRA)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [nn.MSELoss, nn.BCEWithLogitsLoss, nn.CrossEntropyLoss])
def test_factors_have_the_units_of_the_loss_module(loss, reduction):
    """With one case A ⊗ G of the last layer is the Hessian of the module in that layer's matrix."""
    model, x = mlp([4, 5, 3]), normal(1, 4)
    module = loss(reduction=reduction)
    y = random_targets(model(x), "categorical" if loss is nn.CrossEntropyLoss else "bernoulli")
    factors = curvature_of(model, module, x, ExactFisher(), targets=y)
    a = dense.layer_inputs(model, x)[1]
    W = dense.layer_matrices(model)[1]
    hessian = torch.func.hessian(lambda w: module(a @ dense.unvec(w, W.shape).mT, y))(dense.vec(W))
    assert_close(dense.kron(factors.blocks[1].A, factors.blocks[1].G), hessian, **AUTODIFF)


def test_without_neighbours_only_the_diagonal_blocks_are_kept():
    model, x = mlp(WIDTHS), normal(CASES, 4)
    both = [curvature_of(model, Gaussian(), x, ExactFisher(), neighbours=n) for n in (False, True)]
    assert both[0].links == ()
    pairs = zip(*(tensors_in(curvature.blocks) for curvature in both), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)


# ---------------------------------------------------------------------------------------- sampled


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize("samples", [1, 3])
def test_sampled_fisher_averages_over_the_draws(likelihood, samples):
    """The factors are the moments of the scores at the targets that the generator gives."""
    model, x = mlp(WIDTHS), normal(CASES, 4)
    module = LIKELIHOODS[likelihood]()
    factors = curvature_of(model, module, x, SampledFisher(samples=samples), generator=seeded(5))
    z = model(x).detach()
    noise = module.noise(samples, z.shape, z, seeded(5))
    drawn = [dense.empirical_moments(model, x, module.score(z, module.sample(z, n))) for n in noise]
    A = drawn[0][0]
    G = [[sum(G[i][j] for _, G in drawn) / samples for j in range(3)] for i in range(3)]
    assert_moments(factors, A, G, **ALGEBRA)


@pytest.mark.parametrize(
    ("loss", "likelihood"),
    [
        (Gaussian(), "gaussian"),
        (LIKELIHOODS["bernoulli"](), "bernoulli"),
        (Categorical(), "categorical"),
        (nn.CrossEntropyLoss(label_smoothing=0.3), "categorical"),
    ],
    ids=["gaussian", "bernoulli", "categorical", "label_smoothing"],
)
def test_sampled_fisher_is_unbiased(loss, likelihood):
    """The mean over 400 estimates lies within 5 of its standard errors of the exact expectation."""
    model, x = mlp([4, 3, 3]), normal(6, 4)
    A, G = dense.moments(model, x, likelihood)
    generator = seeded(11)
    runs = [curvature_of(model, loss, x, SampledFisher(), generator=generator) for _ in range(400)]
    for i in range(2):
        assert_close(runs[-1].blocks[i].A, A[i][i], **ALGEBRA)
    pairs = [([run.blocks[i].G for run in runs], G[i][i]) for i in range(2)]
    pairs.append(([run.links[0].G_next for run in runs], G[0][1]))
    for estimates, expected in pairs:
        stacked = torch.stack(estimates)
        error = stacked.std(0) / len(runs) ** 0.5
        assert ((stacked.mean(0) - expected).abs() < 5 * error + 1e-12).all()


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
@pytest.mark.parametrize("fisher", [SampledFisher, ExactFisher, EmpiricalFisher])
def test_decay_of_the_moving_average_is_a_fraction(fisher, decay):
    with pytest.raises(ValueError, match="ema_decay"):
        fisher(ema_decay=decay)


def test_at_least_one_sample():
    with pytest.raises(ValueError, match="at least one sample"):
        SampledFisher(samples=0)


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize(
    "fisher",
    [SampledFisher(samples=2), ExactFisher(), EmpiricalFisher()],
    ids=lambda f: type(f).__name__,
)
def test_the_gradients_of_unseen_uses_are_summed_over_chunks_and_then_squared(fisher, chunk):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    network = network_of(model, Categorical()).demoted([1])
    x = normal(CASES, 4)
    y = random_targets(model(x), "categorical")
    whole = estimate_on(network, batch(network, x, y), fisher, seeded(5))
    parts = estimate_on(network, batch(network, x, y, chunk), fisher, seeded(5))
    assert isinstance(whole.blocks[1], DiagonalMoments)
    for left, right in zip(tensors_in(whole), tensors_in(parts), strict=True):
        assert_close(left, right, **ALGEBRA)


class Tokens(nn.Module):
    """Two layers on tokens, with a normalisation whose parameters no adapter describes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5, dtype=torch.float64)
        self.norm = nn.LayerNorm(5, dtype=torch.float64)
        self.last = nn.Linear(5, 3, dtype=torch.float64)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


def tokens_estimate(model, x, y, fisher, generator, unseen=None):
    network = network_of(model, nn.CrossEntropyLoss())
    network = network.demoted([n for n, u in enumerate(network.units) if u.name == unseen])
    with record(model, network.objective) as recording:
        loss = nn.functional.cross_entropy(model(x).reshape(-1, 3), y.reshape(-1))
        loss.backward()
    sample = Sample(recording.batch().passes, partial(linearize, network))
    with torch.no_grad():
        blocks = [unit.block for unit in network.units]
        return estimate(sample, blocks, fisher, generator), network


def test_padding_is_left_out_of_the_inputs_moments():
    torch.manual_seed(0)
    model, x = Tokens(), normal(5, 3, 4)
    y = torch.randint(3, (5, 3), generator=seeded())
    y[:, 2] = -100
    y[0] = -100
    curvature, _ = tokens_estimate(model, x, y, SampledFisher(), seeded())
    a = x[y != -100]
    homogeneous = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    assert_close(curvature.blocks[0].A, homogeneous.mT @ homogeneous / len(a), **ALGEBRA)


@pytest.mark.parametrize("fisher", [ExactFisher(), SampledFisher()])
def test_the_diagonal_of_unseen_uses_is_unbiased(fisher):
    """Also without sampling: products of different examples cancel by random signs."""
    torch.manual_seed(0)
    model, x = Tokens(), normal(6, 2, 4)
    y = torch.randint(3, (6, 2), generator=seeded())
    generator = seeded(1)
    estimates = []
    for _ in range(600):
        curvature, network = tokens_estimate(model, x, y, fisher, generator, unseen="norm")
        number = next(n for n, unit in enumerate(network.units) if unit.name == "norm")
        estimates.append(curvature.blocks[number].D[:, 0])
    found = torch.stack(estimates)
    z = model(x).reshape(-1, 3)
    rows = [torch.autograd.grad(f, model.norm.weight, retain_graph=True)[0] for f in z.reshape(-1)]
    J, p = torch.stack(rows).reshape(12, 3, 5), z.detach().softmax(dim=1)
    F = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    truth = torch.einsum("tik,tij,tjk->k", J, F, J) / 12
    error = found.std(dim=0) / len(found) ** 0.5
    assert bool(((found.mean(dim=0) - truth).abs() <= 4 * error).all())
