"""Networks and losses of every kind: the quadratic model of a step is that of the dense Fisher.

Truth is the generalised Gauss-Newton matrix JᵀHJ, all of it by autograd: J the Jacobian of what the
loss is called with, H the Hessian of the loss there. For the likelihoods here that is the Fisher.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close

from kronfac import KFAC, Blocks, FixedDamping, FixedGamma, QuadraticModel
from kronfac.extend import BlockDiagonalInverse, DiagonalBlock, KroneckerBlock
from tests.conftest import mlp, normal
from tests.optimizer.runs import closure_of

M, LAMBDA, ETA = 6, 0.3, 0.05
Loss = Callable[[Tensor, Tensor], Tensor]


def linear(d_in: int, d_out: int) -> nn.Linear:
    return nn.Linear(d_in, d_out, dtype=torch.float64)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def dense_model(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the loss and JᵀHJ, in the order of `model.parameters()`; of a copy of the model."""
    model = copy.deepcopy(model)
    parameters = list(model.parameters())
    z = model(x)

    def flat(grads: tuple[Tensor | None, ...]) -> Tensor:
        pairs = zip(grads, parameters, strict=True)
        return torch.cat([(torch.zeros_like(p) if g is None else g).reshape(-1) for g, p in pairs])

    def derivative(output: Tensor) -> Tensor:
        return flat(torch.autograd.grad(output, parameters, retain_graph=True, allow_unused=True))

    J = torch.stack([derivative(output) for output in z.reshape(-1)])
    shape = z.shape
    H = torch.autograd.functional.hessian(
        lambda flat_z: loss(flat_z.reshape(shape), y), z.detach().reshape(-1)
    )
    return derivative(loss(z, y)), J.mT @ H @ J


def assert_dense_step(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, own: bool) -> KFAC:
    """Three steps: δ minimises M along the directions that it is made of, and M(δ) is what is reported."""
    optimizer = KFAC(
        model,
        loss,
        weight_decay=ETA,
        fisher="exact",
        damping=FixedDamping(LAMBDA),
        gamma=FixedGamma(0.5),
        step_rule=QuadraticModel(momentum=True),
    )
    last = None
    for step in range(3):
        before = vector(model)
        gradient, F = dense_model(model, loss, x, y)
        gradient = gradient + ETA * before
        B = F + (LAMBDA + ETA) * torch.eye(len(F), dtype=F.dtype)
        optimizer.step(optimizer.closure(x, y) if own else closure_of(optimizer, loss, x, y))
        report = optimizer.report
        assert report.events == ()
        delta = vector(model) - before
        predicted = delta @ B @ delta / 2 + gradient @ delta
        assert report.predicted_change == pytest.approx(float(predicted), rel=1e-6)
        slope = B @ delta + gradient
        directions = [delta] if last is None else [delta, last]
        for direction in directions:
            assert abs(float(slope @ direction)) < 1e-6 * abs(float(gradient @ delta)), step
        last = delta
    return optimizer


# ---------------------------------------------------------------------------------------- networks


class UsedTwice(nn.Module):
    """The first layer is applied two times."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.top = linear(4, 4), linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.top(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


class OutsideItsModule(nn.Module):
    """An autoencoder whose decoder is the encoder's weight, not its module."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.encoder(x)) @ self.encoder.weight


class Flattened(nn.Module):
    """Places become rows inside the model: more outputs than examples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp([4, 5, 3])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.reshape(-1, 4))


def tied() -> nn.Module:
    model = nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4), nn.Tanh(), linear(4, 3))
    model[2].weight = model[0].weight
    return model


def half_frozen() -> nn.Module:
    model = mlp([4, 5, 3])
    model[2].bias.requires_grad_(False)
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "tied": (tied, (M, 4), (M, 3)),
    "used twice": (UsedTwice, (M, 4), (M, 3)),
    "places": (lambda: mlp([4, 5, 3]), (M, 2, 4), (M, 2, 3)),
    "flattened": (Flattened, (M, 2, 4), (2 * M, 3)),
    "PReLU": (
        lambda: nn.Sequential(linear(4, 5), nn.PReLU(dtype=torch.float64), linear(5, 3)),
        (M, 4),
        (M, 3),
    ),
    "LayerNorm": (
        lambda: nn.Sequential(linear(4, 5), nn.LayerNorm(5, dtype=torch.float64), linear(5, 3)),
        (M, 4),
        (M, 3),
    ),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv1d(1, 2, 2, dtype=torch.float64), nn.Tanh(), nn.Flatten(), linear(6, 3)
        ),
        (M, 1, 4),
        (M, 3),
    ),
    "BatchNorm": (
        lambda: nn.Sequential(linear(4, 5), nn.BatchNorm1d(5, dtype=torch.float64), linear(5, 3)),
        (M, 4),
        (M, 3),
    ),
}


@pytest.mark.parametrize("own", [True, False], ids=["KFAC.closure", "own closure"])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_network(network, own):
    make, inputs, outputs = NETWORKS[network]
    x, y = normal(*inputs), normal(*outputs, seed=1)
    assert_dense_step(make(), nn.MSELoss(), x, y, own and len(x) == len(y))


def test_a_bias_that_is_frozen_stays():
    model, x, y = half_frozen(), normal(M, 4), normal(M, 3, seed=1)
    kept = model[2].bias.detach().clone()
    optimizer = KFAC(model, nn.MSELoss())
    losses = [float(optimizer.step(optimizer.closure(x, y))) for _ in range(10)]
    assert [unit.shape for unit in optimizer.network.units] == [(5, 5), (3, 5)]
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(model[2].bias, kept)


def patched() -> nn.Module:
    """A layer whose `forward` is another function."""
    model = mlp([4, 5, 3])
    genuine = model[0].forward
    model[0].forward = lambda x: genuine(x).clamp(-1, 1)
    return model


class SquaredWeight(nn.Module):
    """A weight with a second use that is no product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.out = linear(3, 40), linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.sigmoid(self.encoder(x))) * self.encoder.weight.square().mean()


@pytest.mark.parametrize(("make", "features"), [(OutsideItsModule, 3), (patched, 4)])
def test_uses_outside_a_modules_own_forward_are_seen(make, features):
    """Warnings are errors here."""
    model, x, y = make(), normal(M, features), normal(M, 3, seed=1)
    optimizer = KFAC(model, nn.MSELoss())
    closure = closure_of(optimizer, nn.MSELoss(), x, y)
    losses = [float(optimizer.step(closure).detach()) for _ in range(10)]
    assert losses[-1] < losses[0]
    assert not any(isinstance(unit.block, DiagonalBlock) for unit in optimizer.network.units)


def test_uses_in_several_ways_are_told_of_and_get_a_diagonal_block():
    model, x, y = SquaredWeight(), normal(M, 3), normal(M, 3, seed=1)
    optimizer = KFAC(model, nn.MSELoss(), blocks=Blocks(dense_limit=64))
    closure = closure_of(optimizer, nn.MSELoss(), x, y)
    with pytest.warns(UserWarning, match="does not see all uses of 'encoder.weight'"):
        losses = [float(optimizer.step(closure).detach())]
    blocks = {unit.name: type(unit.block) for unit in optimizer.network.units}
    assert blocks == {"encoder": DiagonalBlock, "out": KroneckerBlock}
    for _ in range(10):  # it was told of once
        losses.append(float(optimizer.step(closure).detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("own", [True, False], ids=["KFAC.closure", "own closure"])
def test_running_statistics_are_those_of_one_pass_at_the_accepted_parameters(own):
    norm = nn.BatchNorm1d(5, dtype=torch.float64)
    model = nn.Sequential(linear(4, 5), norm, nn.Tanh(), linear(5, 3))
    loss = nn.MSELoss()
    optimizer = KFAC(model, loss)
    for step in range(5):
        x, y = normal(M, 4, seed=step), normal(M, 3, seed=9)
        expected = copy.deepcopy(model)
        optimizer.step(optimizer.closure(x, y) if own else closure_of(optimizer, loss, x, y))
        assert not optimizer.report.rejected, "θ would have been another"
        expected(x)
        assert norm.num_batches_tracked == step + 1
        assert_close(norm.running_mean, expected[1].running_mean, rtol=0, atol=0)
        assert_close(norm.running_var, expected[1].running_var, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------- losses


WEIGHTS = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
INDICES = torch.tensor([0, 2, 1, 0, 2, 0])
LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS), INDICES),
    "class weights, sum": (nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), INDICES),
    "smoothed": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2), INDICES),
    "ignored": (nn.CrossEntropyLoss(), torch.tensor([0, 2, -100, 0, 2, 0])),
    "ignored, a class": (nn.CrossEntropyLoss(ignore_index=1), INDICES),
    "soft": (nn.CrossEntropyLoss(weight=WEIGHTS), normal(M, 3, seed=1).softmax(dim=1)),
    "element weights": (nn.BCEWithLogitsLoss(weight=WEIGHTS), normal(M, 3, seed=1).sigmoid()),
    "positives": (nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), normal(M, 3, seed=1).sigmoid()),
}


@pytest.mark.parametrize("own", [True, False], ids=["KFAC.closure", "own closure"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss(name, own):
    loss, y = LOSSES[name]
    assert_dense_step(mlp([4, 5, 3]), loss, normal(M, 4), y, own)


class Tokens(nn.Module):
    """Flattens tokens, as closures do."""

    def __init__(self) -> None:
        super().__init__()
        self.loss = nn.CrossEntropyLoss()

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.loss(z.reshape(-1, z.shape[-1]), y.reshape(-1))


def test_tokens_that_the_closure_flattens():
    model, x = mlp([4, 5, 3]), normal(M, 2, 4)
    y = torch.stack([INDICES, INDICES.flip(0)], dim=1)
    flattened = Tokens()
    optimizer = KFAC(
        model, flattened.loss, fisher="exact", damping=FixedDamping(LAMBDA), gamma=FixedGamma(0.5)
    )
    before = vector(model)
    gradient, F = dense_model(model, flattened, x, y)
    optimizer.step(closure_of(optimizer, flattened, x, y))
    delta = vector(model) - before
    B = F + LAMBDA * torch.eye(len(F), dtype=F.dtype)
    assert optimizer.report.events == ()
    predicted = float(delta @ B @ delta / 2 + gradient @ delta)
    assert optimizer.report.predicted_change == pytest.approx(predicted, rel=1e-6)


class Two(nn.Module):
    """A model of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.layer(x)


def test_a_model_that_returns_more_than_a_tensor():
    models = Two(), nn.Sequential(linear(4, 3))
    models[1][0].load_state_dict(models[0].layer.state_dict())
    x, y = normal(M, 4), normal(M, 3, seed=1)
    for model, loss in zip(
        models, (lambda z, y: functional.mse_loss(z[1], y), functional.mse_loss), strict=True
    ):
        optimizer = KFAC(model, nn.MSELoss())
        for _ in range(4):
            optimizer.step(closure_of(optimizer, loss, x, y))
            assert optimizer.report.events == ()
    assert_close(vector(models[0]), vector(models[1]), rtol=1e-9, atol=1e-10)


# -------------------------------------------------------------------------------- the low-rank route


def test_the_low_rank_route_makes_the_same_steps_with_a_closure_of_the_users_own():
    models = [mlp([4, 30, 30, 3], seed=3) for _ in range(2)]
    optimizers = [
        KFAC(
            model,
            nn.MSELoss(),
            weight_decay=0.2,
            inverse=BlockDiagonalInverse(low_rank=True),
            inverse_interval=4,
        )
        for model in models
    ]
    for step in range(9):
        x, y = normal(M, 4, seed=step), normal(M, 3, seed=9)
        optimizers[0].step(optimizers[0].closure(x, y))
        optimizers[1].step(closure_of(optimizers[1], nn.MSELoss(), x, y))
    assert_close(vector(models[1]), vector(models[0]), rtol=1e-8, atol=1e-9)
