"""Training what the method is for, a float32 autoencoder: also compiled, copied and averaged."""

import copy
import math
import weakref
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import kronfac
from kronfac import KFAC, Intervals, LevenbergMarquardtRule
from kronfac.curvature import DampedInverse
from kronfac.curvature.block_diagonal import PreparedBlocks
from kronfac_experiments.training import sparse_
from tests.conftest import seeded
from tests.optimizer.runs import INVERSES, assert_no_hooks, closure_of, same

WIDTHS = [64, 32, 8, 32, 64]


def blobs(cases: int, seed: int) -> Tensor:
    """8 × 8 images of one soft spot each, grey levels in [0, 1], float32."""
    generator = seeded(seed)
    centre = 1 + 5 * torch.rand(cases, 1, 1, 2, generator=generator)
    width = 0.8 + torch.rand(cases, 1, 1, generator=generator)
    axis = torch.arange(8.0)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), dim=-1)  # (8, 8, 2)
    distance = (grid - centre).square().sum(dim=-1)
    return torch.exp(-distance / (2 * width**2)).flatten(1)


def autoencoder() -> nn.Sequential:
    """Sigmoid units, a linear code layer, sparse initialisation."""
    torch.manual_seed(0)
    modules: list[nn.Module] = []
    for d_in, d_out in pairwise(WIDTHS):
        modules += [nn.Linear(d_in, d_out), nn.Identity() if d_out == 8 else nn.Sigmoid()]
    model = nn.Sequential(*modules[:-1])
    sparse_(model)
    return model


def error(model: nn.Module, x: Tensor) -> float:
    """Summed squared reconstruction error a case."""
    with torch.no_grad():
        return float((model(x).sigmoid() - x).square().sum(dim=1).mean())


@pytest.mark.parametrize("inverse", INVERSES)
def test_an_autoencoder_learns(inverse):
    model, loss = autoencoder(), kronfac.Bernoulli()
    damping = LevenbergMarquardtRule(lambda_=1.0, interval=5)
    settings = kronfac.presets.paper() | {"damping": damping}
    optimizer = KFAC(model, loss, inverse=inverse, weight_decay=1e-5, **settings)
    x = blobs(2000, seed=0)
    test = blobs(500, seed=1)
    start = error(model, test)
    for step in range(60):
        rows = torch.randperm(len(x), generator=seeded(step))[:500]
        optimizer.step(optimizer.closure(x[rows], x[rows], chunk=200))
        report = optimizer.report
        numbers = [report.loss, report.lambda_, report.gamma, report.alpha, report.predicted_change]
        numbers += [n for n in (report.mu, report.rho) if n is not None]
        assert all(map(math.isfinite, numbers)), report
        assert report.predicted_change < 0
        assert report.events == ()
        assert all(p.dtype == torch.float32 for p in model.parameters())
    assert error(model, test) < 0.03 * start  # 16.4 to 0.10 and 0.13 when this was written
    assert_no_hooks(model, loss)


@pytest.mark.parametrize("inverse", INVERSES)
def test_a_compiled_model(inverse):
    """It is compiled once."""
    x = blobs(60, seed=0).double()
    states, graphs = [], []

    def backend(graph, inputs):
        """The whole of torch.compile but for the code generator, which takes a compiler."""
        graphs.append(graph)
        return graph.forward

    for compiled in (False, True):
        model = autoencoder().double()
        loss = kronfac.Bernoulli()
        optimizer = KFAC(
            torch.compile(model, backend=backend) if compiled else model, loss, inverse=inverse
        )
        for _ in range(5):
            optimizer.step(closure_of(optimizer, loss, x, x))
        states.append(dict(model.state_dict()))
    assert len(graphs) == 1
    for name, p in states[0].items():
        torch.testing.assert_close(states[1][name], p, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("inverse", INVERSES)
def test_a_model_may_be_copied_and_averaged_while_it_is_trained(inverse):
    """A copy of the model knows nothing of the optimizer: it takes the same steps with its own."""
    x = blobs(100, seed=0)
    models = [autoencoder()]
    models.append(copy.deepcopy(models[0]))
    average, iterates = AveragedModel(models[0]), []
    for model in models:
        optimizer = KFAC(model, kronfac.Bernoulli(), inverse=inverse)
        for _ in range(4):
            optimizer.step(closure_of(optimizer, optimizer.objective.module, x, x))
            if model is models[0]:
                average.update_parameters(model)
                iterates.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    assert same(*(dict(model.state_dict()) for model in models))
    found = nn.utils.parameters_to_vector(average.module.parameters())
    torch.testing.assert_close(found.detach(), torch.stack(iterates).mean(dim=0))
    later = copy.deepcopy(models[0])
    torch.testing.assert_close(later(x), models[0](x), rtol=0, atol=0)
    assert_no_hooks(*models, later, average)


def test_a_perceptron_is_trained_without_a_graph():
    """By hand: no hidden layer is saved for a backward pass of torch's."""
    saved: list[Tensor] = []
    optimizer = KFAC(autoencoder(), kronfac.Bernoulli())
    x = blobs(20, seed=0)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        optimizer.step(optimizer.closure(x, x))
        assert not any(t.shape == (20, 32) for t in saved)
        optimizer.step(optimizer.closure(x, x, chunk=10))
        assert any(t.shape == (10, 32) for t in saved), "chunks are left to torch"


def test_a_search_for_gamma_holds_three_inverses_at_the_most(monkeypatch):
    """The one before it, which a refused step goes on with, the best so far and the one being made."""
    alive: list[weakref.ref[DampedInverse]] = []
    most = 0
    damped = PreparedBlocks.damped

    def counted(prepared: PreparedBlocks, gamma: float) -> DampedInverse:
        nonlocal most
        most = max(most, 1 + sum(reference() is not None for reference in alive))
        made = damped(prepared, gamma)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(PreparedBlocks, "damped", counted)
    search = kronfac.GammaSearch(interval=1)
    optimizer = KFAC(
        autoencoder(),
        kronfac.Bernoulli(),
        damping=LevenbergMarquardtRule(lambda_=1.0),
        gamma=search,
        intervals=Intervals(inverse_interval=1),
    )
    x = blobs(20, seed=0)
    for _ in range(4):
        optimizer.step(optimizer.closure(x, x))
    assert len(alive) == 4 * 3, "every step searches among three"
    assert most == 3
