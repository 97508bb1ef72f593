"""Networks and losses of every kind: the quadratic model of a step is that of the dense Fisher.

Truth is the generalised Gauss-Newton matrix JᵀHJ, all of it by autograd: J the Jacobian of what the
loss is called with, H the Hessian of the loss there. For the likelihoods here that is the Fisher.
"""

import copy
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, FixedDamping, FixedGamma, Intervals, QuadraticModel
from tests.conftest import mlp, normal, seeded

M, LAMBDA, ETA = 6, 0.3, 0.05
Loss = Callable[[Tensor, Tensor], Tensor]


def linear(d_in: int, d_out: int) -> nn.Linear:
    return nn.Linear(d_in, d_out, dtype=torch.float64)


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def dense_model(
    model: nn.Module, loss: Loss, inputs: tuple[Tensor, ...], y: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradient of the loss and JᵀHJ, in the order of `vector`; of a copy of the model."""
    model = copy.deepcopy(model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    z = model(*inputs)

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


def assert_dense_step(
    model: nn.Module,
    loss: nn.Module,
    x: Tensor | tuple[Tensor, ...],
    y: Tensor,
    own: bool = False,
    objective: Loss | None = None,
    **settings: Any,
) -> KFAC:
    """Three steps: δ minimises M along the directions that it is made of, and M(δ) is what is reported.

    Args:
        model: what is trained.
        loss: what KFAC is given.
        x: the inputs.
        y: targets.
        own: whether the closure is K-FAC's own.
        objective: what the closure computes; `loss` by default.
        settings: of KFAC.
    """
    fixed = {
        "weight_decay": ETA,
        "fisher": "exact",
        "damping": FixedDamping(LAMBDA),
        "gamma": FixedGamma(0.5),
        "step_rule": QuadraticModel(bounded=False, memory=None),
    }
    optimizer = KFAC(model, loss, **fixed | settings)
    inputs, objective = x if isinstance(x, tuple) else (x,), objective or loss

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective(model(*inputs), y)
        value.backward()
        return value

    last = None
    for step in range(3):
        before = vector(model)
        gradient, F = dense_model(model, objective, inputs, y)
        gradient = gradient + ETA * before
        B = F + (LAMBDA + ETA) * torch.eye(len(F), dtype=F.dtype)
        optimizer.step(optimizer.closure(x, y) if own else closure)
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


class ScaledByItsNorm(nn.Module):
    """A network whose first weight has a second use that is no product with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = linear(4, 4), linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.sigmoid(self.first(x))) * self.first.weight.square().sum()


def tied() -> nn.Module:
    model = nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4), nn.Tanh(), linear(4, 3))
    model[2].weight = model[0].weight
    return model


def without_its_bias() -> nn.Module:
    """K-FAC leaves a frozen bias out of the layer's matrix."""
    model = mlp([4, 5, 3])
    model[2].bias.requires_grad_(False)
    return model


def with_another_forward() -> nn.Module:
    """A layer whose `forward` was replaced."""
    model = mlp([4, 5, 3])
    model[0].forward = MethodType(lambda self, x: nn.Linear.forward(self, x).clamp(-1, 1), model[0])
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "tied": (tied, (M, 4), (M, 3)),
    "used twice": (UsedTwice, (M, 4), (M, 3)),
    "places": (lambda: mlp([4, 5, 3]), (M, 2, 4), (M, 2, 3)),
    "scaled by its norm": (ScaledByItsNorm, (M, 4), (M, 3)),
    "another forward": (with_another_forward, (M, 4), (M, 3)),
    "frozen bias": (without_its_bias, (M, 4), (M, 3)),
    "dropout that is off": (
        lambda: nn.Sequential(*mlp([4, 5]), nn.Dropout(), *mlp([5, 3])).eval(),
        (M, 4),
        (M, 3),
    ),
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
    model, x, y = make(), normal(*inputs), normal(*outputs, seed=1)
    frozen = [(p, p.detach().clone()) for p in model.parameters() if not p.requires_grad]
    assert_dense_step(model, nn.MSELoss(), x, y, own and len(x) == len(y))
    assert all(torch.equal(p, before) and p.grad is None for p, before in frozen)


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


# -------------------------------------------------------------------------------- tokens and pixels

EXAMPLES, PLACES, CLASSES = 6, 4, 3
TOKENS = normal(EXAMPLES, PLACES, 5)
HARD = torch.randint(CLASSES, (EXAMPLES * PLACES,), generator=seeded(1))
SOME_IGNORED = torch.where(torch.arange(len(HARD)) % 5 == 0, -100, HARD)


class Shared(nn.Module):
    """Logits (examples, places, classes), from Linear layers that every place goes through."""

    places = 1

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = linear(5, 6), linear(6, self.places * CLASSES)

    def forward(self, x: Tensor, mask: Tensor | float = 1.0) -> Tensor:
        return self.out(torch.tanh(self.hidden(x * mask)))


class Places(Shared):
    """Logits (examples, places, classes), from Linear layers on vectors."""

    places = PLACES

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0]).reshape(-1, PLACES, CLASSES)


class Image(Places):
    """Logits (examples, classes, 2, 2)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mT.reshape(-1, CLASSES, 2, 2)


class Flattening(Shared):
    """Logits (examples · places, classes): more rows come out of the model than go in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, 5))


def as_rows(z: Tensor) -> Tensor:
    return z.reshape(-1, CLASSES)


def pixels_as_rows(z: Tensor) -> Tensor:
    return as_rows(z.permute(0, 2, 3, 1))


VIEWS = {
    "tokens": (Places, as_rows),
    "pixels": (Image, pixels_as_rows),
    "shared weights": (Shared, as_rows),
    "flattened in forward": (Flattening, as_rows),
}
ROW_LOSSES: dict[str, tuple[nn.Module, Tensor]] = {
    "hard targets, summed": (nn.CrossEntropyLoss(reduction="sum"), HARD),
    "soft targets, smoothed": (
        nn.CrossEntropyLoss(label_smoothing=0.1),
        normal(EXAMPLES * PLACES, CLASSES, seed=2).softmax(dim=1),
    ),
    "class weights, ignore_index": (nn.CrossEntropyLoss(weight=WEIGHTS), SOME_IGNORED),
}


@pytest.mark.parametrize("loss", ROW_LOSSES)
@pytest.mark.parametrize("view", VIEWS)
def test_every_row_that_the_loss_was_called_with_is_a_term_of_its_own(view, loss):
    (make, rows), (module, y) = VIEWS[view], ROW_LOSSES[loss]
    assert_dense_step(make(), module, TOKENS, y, objective=lambda z, y: module(rows(z), y))


@pytest.mark.parametrize("loss", ["hard targets, summed", "class weights, ignore_index"])
def test_classes_in_the_second_of_four_dimensions(loss):
    module, y = ROW_LOSSES[loss]
    assert_dense_step(Image(), module, TOKENS, y.reshape(EXAMPLES, 2, 2))


@pytest.mark.parametrize("fraction", [0.3, 0.5])
def test_a_part_of_the_examples_has_all_of_its_places(fraction):
    """All examples are the same one, so that every subset of them has the same curvature."""
    x, y = TOKENS[:1].expand(EXAMPLES, -1, -1).contiguous(), HARD[:PLACES].repeat(EXAMPLES)
    intervals = Intervals(fraction, fraction)
    assert_dense_step(Flattening(), nn.CrossEntropyLoss(), x, y, intervals=intervals)


def test_an_argument_that_is_as_long_as_the_mini_batch_by_coincidence():
    """A mask over the features of examples that are all the same one."""
    x, mask = TOKENS[:1, 0].expand(5, -1).contiguous(), normal(5, seed=3)
    y = torch.zeros(5, dtype=torch.long)
    settings = {"intervals": Intervals(0.5, 0.5), "fisher": "sampled"}
    assert_dense_step(Shared(), nn.CrossEntropyLoss(), (x, mask), y, **settings)
