"""KFAC(inverse="ekfac"): what its inverse is from step to step, and that it trains."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac.linalg.spd
from kronfac import KFAC, EventKind, FixedDamping, FixedGamma, Intervals, RawStep
from kronfac.extend import EigenvalueCorrectedInverse, ExactFisher, ExactTikhonov
from tests.conftest import AUTODIFF, mlp, normal
from tests.reference import dense

INTERVAL, LAG, GAMMA = 5, 3, 0.3
FIXED: dict[str, Any] = {
    "inverse": EigenvalueCorrectedInverse(ExactTikhonov()),
    "damping": FixedDamping(0.1),
    "gamma": FixedGamma(GAMMA),
    "intervals": Intervals(inverse_interval=INTERVAL),
}


def new(**settings: Any) -> KFAC:
    return KFAC(mlp([6, 9, 9, 3], seed=3), nn.MSELoss(), **FIXED | settings)


def data(k: int) -> tuple[Tensor, Tensor]:
    return normal(7, 6, seed=k), normal(7, 3, seed=100 + k)


def pieces(optimizer: KFAC) -> list[dict[str, Any]]:
    """The inverses of the units: eigenvectors, second moments, how many steps these are of."""
    return optimizer.state_dict()["kfac"]["current"]["inverse"]["pieces"]


def second_moments(F, E, shapes):
    """diag(Eᵀ F E) of every diagonal block, as matrices S (rows, columns)."""
    sizes = [rows * columns for rows, columns in shapes]
    blocks = [row.split(sizes, dim=1)[i] for i, row in enumerate(F.split(sizes))]
    return [
        dense.unvec((B.mT @ block @ B).diagonal(), shape)
        for block, B, shape in zip(blocks, E, shapes, strict=True)
    ]


@pytest.mark.parametrize("lag", [0, LAG])
def test_whole_steps_by_the_dense_definition(lag):
    """θ ← θ − E (S + γ²)⁻¹ Eᵀ ∇h, E of the last refresh, S of all steps since, this one included."""
    optimizer = new(
        intervals=Intervals(1.0, None, INTERVAL, lag),
        step_rule=RawStep(1.0),
        fisher=ExactFisher(ema_decay=0.9),
        damping=FixedDamping(0.1, reject=None),
    )
    model, loss = optimizer.model, nn.MSELoss()
    shapes = dense.shapes(model)
    curvature: dict[int, Any] = {}
    S: list[Any] = []
    E: list[Any] = []
    n = 0
    for k in range(1, 15):
        x, y = data(k)
        A, G = dense.moments(model, x, "gaussian", variance=0.5, scale=1 / 3)
        decay = min(1 - 1 / k, 0.9)
        curvature[k] = [
            (A[i][i], G[i][i])
            if k == 1
            else tuple(
                decay * old + (1 - decay) * new[i][i]
                for old, new in zip(curvature[k - 1][i], (A, G), strict=True)
            )
            for i in range(len(shapes))
        ]
        begun = k if k <= 3 else k - lag  # whose factors a refresh at this step is made of
        if k <= 3 or (begun > 3 and begun % INTERVAL == 0):
            eigen = [[torch.linalg.eigh(M) for M in pair] for pair in curvature[begun]]
            E = [dense.kron(a.eigenvectors, g.eigenvectors) for a, g in eigen]
            S = [torch.outer(g.eigenvalues, a.eigenvalues) for a, g in eigen]
            n = 0
        else:
            F = dense.exact_fisher(model, x, "gaussian", variance=0.5, scale=1 / 3)
            keep = min(1 - 1 / (n + 2), decay)
            S = [
                keep * old + (1 - keep) * new
                for old, new in zip(S, second_moments(F, E, shapes), strict=True)
            ]
            n += 1
        gradient = dense.unflatten(dense.gradient(model, loss, x, y), shapes)
        directions = [
            B @ ((B.mT @ dense.vec(V)) / (dense.vec(s) + GAMMA**2))
            for B, s, V in zip(E, S, gradient, strict=True)
        ]
        expected = dense.theta(model) - torch.cat(directions)
        optimizer.step(optimizer.closure(x, y))
        assert_close(dense.theta(model), expected, **AUTODIFF)
        assert [piece["observed"] for piece in pieces(optimizer)] == [n] * len(shapes)


def test_a_block_without_an_eigendecomposition_keeps_its_last_inverse(monkeypatch):
    """And its second moments go on."""
    optimizer = new()
    for k in range(1, INTERVAL):
        optimizer.step(optimizer.closure(*data(k)))
    old = pieces(optimizer)
    original = torch.linalg.eigh

    def fail(M, *args, **kwargs):
        if len(M) == 7:  # A of the first layer
            raise torch.linalg.LinAlgError("as told")
        return original(M, *args, **kwargs)

    monkeypatch.setattr(kronfac.linalg.spd.torch.linalg, "eigh", fail)
    optimizer.step(optimizer.closure(*data(INTERVAL)))
    (event,) = optimizer.report.events
    assert event.kind == EventKind.BLOCK_FAILED
    found = pieces(optimizer)
    assert [torch.equal(a["E_A"], b["E_A"]) for a, b in zip(found, old, strict=True)] == [
        True,
        False,
        False,
    ]
    assert [piece["observed"] for piece in found] == [old[0]["observed"] + 1, 0, 0]


# ------------------------------------------------------------------------------------------- training


def regression(seed):
    x = normal(200, 5, seed=seed)
    return mlp([5, 20, 20, 2], seed=seed), nn.MSELoss(), x, (x @ normal(5, 2, seed=seed + 50)).sin()


def classification(seed):
    x = normal(200, 5, seed=seed)
    y = (x @ normal(5, 8, seed=seed + 50)).tanh() @ normal(8, 3, seed=seed + 60)
    return mlp([5, 20, 20, 3], seed=seed), nn.CrossEntropyLoss(), x, y.argmax(dim=1)


def steps_to(target, problem, seed, inverse):
    model, loss, x, y = problem(seed)
    optimizer = KFAC(model, loss, inverse=inverse)
    for k in range(1, 201):
        if float(optimizer.step(optimizer.closure(x, y))) < target:
            return k
    raise AssertionError(f"{inverse} does not reach {target} in 200 steps")


@pytest.mark.parametrize(("problem", "target"), [(regression, 5e-3), (classification, 2e-2)])
def test_it_takes_at_most_1_3_times_the_steps_of_the_block_diagonal_inverse(problem, target):
    for seed in range(3):
        ours, other = (
            steps_to(target, problem, seed, inverse) for inverse in ("ekfac", "block_diagonal")
        )
        assert ours <= 1.3 * other, (seed, ours, other)


def noisy(seed):
    """With noise in the targets, and torch's own initial parameters, which are small."""
    torch.manual_seed(seed)
    x = torch.randn(512, 10)
    y = (x @ torch.randn(10, 3)).sin() + 0.1 * torch.randn(512, 3)
    layers = nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    return nn.Sequential(*layers), nn.MSELoss(), x, y


def test_the_factored_damping_takes_fewer_steps_than_gamma_squared_alone():
    """Why it is the default."""
    for seed in range(3):
        factored, exact = (
            steps_to(0.05, noisy, seed, inverse)
            for inverse in ("ekfac", EigenvalueCorrectedInverse(ExactTikhonov()))
        )
        assert factored < 0.9 * exact, (seed, factored, exact)
