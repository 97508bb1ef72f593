"""The gradient after `step`, beside the dense matrix of its definition, in float64."""

import pytest
import torch
from torch import Tensor, nn

from kronfac import Preconditioner
from kronfac.extend import (
    BlockDiagonalInverse,
    EigenvalueCorrectedInverse,
    ExactTikhonov,
)
from tests.conftest import AUTODIFF
from tests.reference import dense

DAMPING = 0.03


def problem() -> tuple[nn.Sequential, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    return model.double(), torch.randn(40, 4, dtype=torch.float64), torch.randint(3, (40,))


def solve(F: Tensor, g: Tensor) -> Tensor:
    """(F + damping · I)⁻¹ g."""
    return torch.linalg.solve(F + DAMPING * torch.eye(len(F), dtype=F.dtype), g)


def gradient(model: nn.Module) -> Tensor:
    """p.grad of all layers as one vector, in the reference's layout."""
    layers = dense.linears(model)  # type: ignore[arg-type]
    return dense.flatten([torch.cat([m.weight.grad, m.bias.grad[:, None]], 1) for m in layers])


def stepped(model: nn.Module, x: Tensor, y: Tensor, **settings: object) -> tuple[Tensor, Tensor]:
    """The gradient before and after one step."""
    loss_fn = nn.CrossEntropyLoss()
    settings = {"damping": DAMPING, "fisher": "exact", "statistics_fraction": 1.0, **settings}
    preconditioner = Preconditioner(model, loss_fn, **settings)  # type: ignore[arg-type]
    loss_fn(model(x), y).backward()
    before = gradient(model)
    preconditioner.step()
    preconditioner.close()
    return before, gradient(model)


def test_both_sides():
    """(A ⊗ G + damping · I)⁻¹ g, layer by layer."""
    model, x, y = problem()
    A, G = dense.moments(model, x, "categorical")
    before, after = stepped(model, x, y)
    F = dense.block_diagonal_fisher(A, G)
    expected = solve(F, before)
    torch.testing.assert_close(after, expected, **AUTODIFF)


def test_the_factored_damping_of_an_inverse_that_is_given():
    model, x, y = problem()
    A, G = dense.moments(model, x, "categorical")
    before, after = stepped(model, x, y, inverse=BlockDiagonalInverse())
    damped = dense.block_diagonal_fisher(*dense.factored_tikhonov(A, G, DAMPING**0.5, "trace"))
    torch.testing.assert_close(after, torch.linalg.solve(damped, before), **AUTODIFF)


def test_ekfac_is_diagonal_in_the_eigenbasis():
    """At first with the eigenvalues of A ⊗ G, so that it is the block-diagonal inverse."""
    results = []
    for inverse in ("block_diagonal", "ekfac", EigenvalueCorrectedInverse(ExactTikhonov())):
        model, x, y = problem()
        results.append(stepped(model, x, y, inverse=inverse)[1])
    torch.testing.assert_close(results[1], results[0], **AUTODIFF)
    torch.testing.assert_close(results[2], results[0], **AUTODIFF)


def test_a_moving_average():
    """A and G of two mini-batches: a plain mean at first, then 1 − decay for the last one."""
    model, x, y = problem()
    loss_fn = nn.CrossEntropyLoss()
    preconditioner = Preconditioner(
        model, loss_fn, damping=DAMPING, fisher="exact", statistics_fraction=1.0,
        inverse_interval=1, decay=0.3,
    )  # fmt: skip
    halves = [(x[:20], y[:20]), (x[20:], y[20:])]
    for inputs, targets in halves:
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()
        before = gradient(model)
        preconditioner.step()
    (A1, G1), (A2, G2) = (dense.moments(model, inputs, "categorical") for inputs, _ in halves)
    A = [
        [0.3 * a + 0.7 * b for a, b in zip(*rows, strict=True)] for rows in zip(A1, A2, strict=True)
    ]
    G = [
        [0.3 * a + 0.7 * b for a, b in zip(*rows, strict=True)] for rows in zip(G1, G2, strict=True)
    ]
    F = dense.block_diagonal_fisher(A, G)
    expected = solve(F, before)
    torch.testing.assert_close(gradient(model), expected, **AUTODIFF)


def test_micro_batches_are_one_mini_batch():
    model, x, y = problem()
    _, whole = stepped(model, x, y)
    model, x, y = problem()
    loss_fn = nn.CrossEntropyLoss()
    preconditioner = Preconditioner(
        model, loss_fn, damping=DAMPING, fisher="exact", statistics_fraction=1.0
    )
    for inputs, targets in zip(x.split(10), y.split(10), strict=True):
        (loss_fn(model(inputs), targets) / 4).backward()
    preconditioner.step()
    torch.testing.assert_close(gradient(model), whole, **AUTODIFF)


@pytest.mark.parametrize("kappa", [1e-4, 1e6])
def test_the_bound_on_the_step(kappa):
    """ν = min(1, √(κ / (lr² gᵀΔ)))."""
    model, x, y = problem()
    before, plain = stepped(model, x, y)
    model, x, y = problem()
    _, clipped = stepped(model, x, y, kl_clip=kappa, lr=lambda step: 0.1)
    nu = min(1.0, (kappa / (0.01 * float(before @ plain))) ** 0.5)
    assert nu == 1 or nu < 0.9
    torch.testing.assert_close(clipped, nu * plain, **AUTODIFF)


def test_a_perceptron_inside_of_autocast():
    """Statistics are in the parameters' dtype; the gradient is as bfloat16 has it."""
    model, x, y = problem()
    model, x = model.float(), x.float()
    loss_fn = nn.CrossEntropyLoss()
    preconditioner = Preconditioner(
        model, loss_fn, damping=DAMPING, fisher="exact", statistics_fraction=1.0
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_fn(model(x), y)
    loss.backward()
    before = gradient(model)
    preconditioner.step()
    A, G = dense.moments(model.double(), x.double(), "categorical")
    expected = solve(dense.block_diagonal_fisher(A, G), before.double())
    torch.testing.assert_close(gradient(model).double(), expected, rtol=1e-3, atol=1e-4)
