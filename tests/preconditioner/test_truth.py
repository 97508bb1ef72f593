"""The gradient after `step`, beside the dense matrix of its definition, in float64."""

import pytest
import torch
from torch import Tensor, nn

from kronfac import Preconditioner
from kronfac.curvature import InputBlock, Tap
from kronfac.curvature.block import blend
from kronfac.errors import StateError
from kronfac.extend import (
    BlockDiagonalInverse,
    EigenvalueCorrectedInverse,
    ExactTikhonov,
    KroneckerBlock,
)
from kronfac.linearize.by_hand import Trace, trace_of
from kronfac.storage import Layout, pack, unpack
from tests.conftest import ALGEBRA, AUTODIFF
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


def test_the_input_side():
    """(A ⊗ I + damping · I)⁻¹ g, and neither targets nor a likelihood count."""
    model, x, y = problem()
    A, G = dense.moments(model, x, "categorical")
    before, after = stepped(model, x, y, sides="inputs")
    sizes = [len(row[i]) for i, row in enumerate(G)]
    sides = [dense.kron(A[i][i], torch.eye(n, dtype=torch.float64)) for i, n in enumerate(sizes)]
    F = torch.block_diag(*sides)
    expected = solve(F, before)
    torch.testing.assert_close(after, expected, **AUTODIFF)


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_input_side_has_no_backward_pass(monkeypatch, by_hand):
    model, x, y = problem()
    model = model if by_hand else nn.Sequential(*model, nn.Unflatten(1, (3, 1)), nn.Flatten())
    loss = nn.CrossEntropyLoss()
    preconditioner = Preconditioner(model, loss, sides="inputs")
    loss(model(x), y).backward()
    assert (
        trace_of(preconditioner.network, preconditioner._recorder.batch().passes[0]) is not None
    ) is by_hand

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a backward pass")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    monkeypatch.setattr(torch.autograd, "backward", refuse)
    monkeypatch.setattr(Trace, "backwards", refuse)
    preconditioner.step()
    assert preconditioner.steps == 1


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


@pytest.mark.parametrize("sides", ["both", "inputs"])
def test_micro_batches_are_one_mini_batch(sides):
    model, x, y = problem()
    _, whole = stepped(model, x, y, sides=sides)
    model, x, y = problem()
    loss_fn = nn.CrossEntropyLoss()
    preconditioner = Preconditioner(
        model, loss_fn, damping=DAMPING, fisher="exact", statistics_fraction=1.0, sides=sides
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


def test_the_input_side_of_a_convolution_and_an_embedding():
    """A is the second moment of patches with a one for the bias; of tokens, their frequencies."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(7, 9),
        nn.Unflatten(1, (2, 3)),
        nn.Conv2d(2, 3, 2),
        nn.Flatten(),
        nn.Linear(48, 2),
    ).double()
    x, y = torch.randint(5, (30, 6)), torch.randint(2, (30,))
    loss_fn = nn.CrossEntropyLoss()
    preconditioner = Preconditioner(
        model, loss_fn, sides="inputs", damping=DAMPING, statistics_fraction=1.0
    )
    loss_fn(model(x), y).backward()
    embedding, conv = model[0], model[2]
    tokens, kernel, bias = (p.grad.clone() for p in (embedding.weight, conv.weight, conv.bias))
    preconditioner.step()
    frequencies = torch.bincount(x.flatten(), minlength=7).double() / x.numel()
    expected = tokens / (frequencies + DAMPING)[:, None]
    torch.testing.assert_close(embedding.weight.grad, expected, **AUTODIFF)
    patches = nn.functional.unfold(model[:2](x).detach(), 2).mT.reshape(-1, 8)
    patches = torch.cat([patches, torch.ones(len(patches), 1, dtype=torch.float64)], dim=1)
    A = patches.mT @ patches / len(patches) + DAMPING * torch.eye(9, dtype=torch.float64)
    V = torch.cat([kernel.flatten(1), bias[:, None]], dim=1)
    found = torch.cat([conv.weight.grad.flatten(1), conv.bias.grad[:, None]], dim=1)
    torch.testing.assert_close(found, V @ torch.linalg.inv(A), **AUTODIFF)


def test_the_block_of_the_input_side_keeps_the_contract_of_blocks():
    """A ⊗ I by its definition, for Vᵀ on the other side, and damped."""
    torch.manual_seed(2)
    a, g = torch.randn(10, 3, 4).double(), torch.zeros(10, 3, 5).double()
    A = a.flatten(0, 1).mT @ a.flatten(0, 1) / 30
    I5 = torch.eye(5, dtype=torch.float64)
    for transposed, dense_A, shape in (
        (False, dense.kron(A, I5), (5, 4)),
        (True, dense.kron(I5, A), (4, 5)),
    ):
        block = InputBlock(*shape, KroneckerBlock())
        moments = block.observe([Tap(a, g, transposed=transposed)], 1.0)
        torch.testing.assert_close(moments.dense(), dense_A, **ALGEBRA)
        torch.testing.assert_close(moments.trace(), dense_A.trace(), **ALGEBRA)
        operator = moments.damped(0.3, ExactTikhonov())
        inverse = torch.linalg.inv(dense_A + 0.09 * torch.eye(20, dtype=torch.float64))
        torch.testing.assert_close(operator.to_dense(), inverse, **ALGEBRA)
        V = torch.randn(*shape).double()
        torch.testing.assert_close(dense.vec(operator.mv(V)), inverse @ dense.vec(V), **ALGEBRA)
        layout = Layout("layer", *shape, torch.float64)
        for value in (moments, operator):
            value.check(layout)
            assert type(unpack(pack(value))) is type(value)
            with pytest.raises(StateError):
                value.check(Layout("layer", 5, 5, torch.float64))
    kept = InputBlock(5, 4).average(None, 0.9).value()
    assert kept.A is kept.G is None
    assert torch.equal(kept.damped(0.3, ExactTikhonov()).mv(V.mT), V.mT)


@pytest.mark.parametrize("diagonal", [False, True])
def test_a_rank_that_has_not_used_a_unit_learns_on_which_side_its_inputs_are(diagonal):
    """Sums of all ranks have one shape, and what was there before is of another matrix."""
    block = InputBlock(5, 4, KroneckerBlock(diagonal_grads=diagonal))
    used, idle = block.average(None, 0.0), block.average(None, 0.0)
    a, g = torch.randn(7, 2, 5).double(), torch.randn(7, 2, 4).double()
    used.add([Tap(a, g, transposed=True)], 1.0, 1.0)
    zeros = [Tap(torch.zeros(1, 1, 4).double(), torch.zeros(1, 1, 5).double())]
    idle.add(zeros, 0.0, 0.0)
    before = idle.value()
    totals = [sum(column) for column in zip(used.counts(), idle.counts(), strict=True)]
    for average in (used, idle):
        average.weigh(totals)
    (left,), (right,) = used.parts(), idle.parts()
    left[0].add_(right[0])
    A = a.flatten(0, 1).mT @ a.flatten(0, 1) / 14
    found = blend(before, used.value(), 0.95)
    assert found.A is None
    torch.testing.assert_close(found.G, A.diagonal() if diagonal else A, **ALGEBRA)


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
