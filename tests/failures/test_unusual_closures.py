"""Closures and models that are legitimate and unusual: right, or a warning that says what is not seen."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kronfac
from kronfac import KFAC, Blocks, FixedGamma, LevenbergMarquardtRule
from kronfac.errors import ClosureError
from tests.conftest import mlp, normal
from tests.failures.steps import FIXED, closure_of, train
from tests.optimizer.test_any_network import ScaledByItsNorm

X, Y = normal(12, 4), normal(12, 3, seed=1)
CLASSES = torch.randint(3, (12,), generator=torch.Generator().manual_seed(2))


class Subclass(Tensor):
    """A class of tensors; torch shows no `TorchFunctionMode` how they are made."""


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_some_of_which_are_ignored_have_the_mean_of_the_whole(chunk):
    model, loss = mlp([4, 5, 3]), nn.CrossEntropyLoss(ignore_index=1)
    optimizer = KFAC(model, loss)
    expected = loss(model(X), CLASSES)
    gradient = torch.autograd.grad(expected, list(model.parameters()))
    found = optimizer.closure(X, CLASSES, chunk=chunk)()
    torch.testing.assert_close(found, expected.detach(), check_dtype=False)
    for p, g in zip(model.parameters(), gradient, strict=True):
        torch.testing.assert_close(p.grad, g)


def masked(model: nn.Module) -> Tensor:
    z = model(X)
    z[:, 0] = -1.0
    return F.cross_entropy(z, CLASSES)


def through_a_view(model: nn.Module) -> Tensor:
    z = model(X)
    z[:, :2].mul_(5)
    return F.cross_entropy(z, CLASSES)


def into_its_own(model: nn.Module) -> Tensor:
    t = torch.zeros(12, 3, dtype=torch.float64)
    t += model(X)
    return F.cross_entropy(t, CLASSES)


def between_parts(model: nn.Module) -> Tensor:
    h = model[0](X)
    h.relu_()
    return F.cross_entropy(model[2](h), CLASSES)


def before_it_is_a_subclass(model: nn.Module) -> Tensor:
    z = model(X)
    z.mul_(2.0)
    return F.cross_entropy(z.as_subclass(Subclass), CLASSES)


def after_it_was_made_a_subclass(model: nn.Module) -> Tensor:
    z = model(X)
    other = z.as_subclass(Subclass)
    z.mul_(2.0)
    return F.cross_entropy(other, CLASSES)


@pytest.mark.parametrize(
    ("objective", "function"),
    [
        (masked, "__setitem__"),
        (before_it_is_a_subclass, "mul_"),
        (after_it_was_made_a_subclass, "mul_"),
        (through_a_view, "mul_"),
        (into_its_own, "add_"),
        (between_parts, "relu_"),
    ],
)
def test_outputs_that_are_written_to_in_place_are_refused(objective, function):
    optimizer = KFAC(mlp([4, 5, 3]), nn.CrossEntropyLoss())
    message = rf"KFAC repeats .* outputs that {function} has written to.*torch\.where"
    with pytest.raises(ClosureError, match=message):
        optimizer.step(closure_of(optimizer, objective))


def with_metrics(model: nn.Module) -> Tensor:
    z, metrics = model(X), torch.zeros(3)
    loss = F.cross_entropy(z, CLASSES)
    metrics[0] += (z.argmax(1) == CLASSES).sum()
    metrics[1:].add_(z.detach().clamp_(0, 1).mean())
    return loss


def divided(model: nn.Module) -> Tensor:
    value = F.cross_entropy(model(X), CLASSES)
    value /= 2
    return value


@pytest.mark.parametrize("objective", [with_metrics, divided])
def test_metrics_and_the_loss_may_be_written_to_in_place(objective):
    optimizer = KFAC(mlp([4, 5, 3]), nn.CrossEntropyLoss())
    optimizer.step(closure_of(optimizer, objective))
    assert not optimizer.report.events


def test_rho_of_a_loss_that_is_observed_has_the_masks_of_the_closure():
    torch.manual_seed(0)
    model = nn.Sequential(*mlp([4, 16]), nn.Dropout(0.5), *mlp([16, 3], seed=1))
    optimizer = KFAC(
        model,
        kronfac.Gaussian(),
        damping=LevenbergMarquardtRule(1e3, interval=1),
        gamma=FixedGamma(1.0),
    )

    def objective(model: nn.Module) -> Tensor:
        z = kronfac.observe(model(X), kronfac.Gaussian(variance=0.5), scale=1 / 36)
        return (z - Y).square().mean()

    for _ in range(5):
        before = torch.get_rng_state()
        optimizer.step(closure_of(optimizer, objective))
        assert 0.5 < optimizer.report.rho < 2.5  # with other masks it is anything
        after = torch.get_rng_state()
        torch.set_rng_state(before)
        model(X)
        assert torch.equal(torch.get_rng_state(), after)  # the closure's own pass, and no other


def test_buffers_under_autocast_are_those_of_one_pass():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    loss = nn.MSELoss()
    optimizer = KFAC(model, loss)
    x, y = X.float(), Y.float()
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            optimizer.step(closure_of(optimizer, lambda model: loss(model(x).float(), y)))
        assert int(model[1].num_batches_tracked) == step + 1


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(4, 3, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x)


def test_units_that_some_passes_do_not_use_have_the_mean_of_the_others():
    model, loss = TwoHeads(), nn.MSELoss()
    optimizer = KFAC(model, loss, **FIXED)
    optimizer.step(
        closure_of(optimizer, lambda model: loss(model(X, 0), Y) + loss(model(2 * X, 1), Y))
    )
    for block, x in zip(optimizer._state.curvature.blocks, (X, 2 * X), strict=True):
        homogeneous = torch.cat([x, torch.ones(12, 1, dtype=x.dtype)], dim=1)
        torch.testing.assert_close(block.A, homogeneous.mT @ homogeneous / 12)


class Detached(nn.Module):
    """One of the calls of its layer has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, dtype=torch.float64)
        self.out = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layer(x)
        return self.out(torch.tanh(self.layer(x)) + target.detach() * 0)


def test_a_use_without_a_gradient_does_not_count():
    model, loss = Detached(), nn.MSELoss()
    optimizer = KFAC(model, loss)
    for _ in range(5):
        optimizer.step(closure_of(optimizer, lambda model: loss(model(X), Y)))


# ------------------------------------------------------------- weights used outside of their modules


def test_a_use_that_is_no_product_is_named_in_one_warning():
    loss = nn.MSELoss()
    # Small ones would have a dense block, which takes uses of every kind.
    optimizer = KFAC(ScaledByItsNorm(), loss, blocks=Blocks(dense_limit=0))
    closure = closure_of(optimizer, lambda model: loss(model(X), Y))
    with pytest.warns(UserWarning, match=r"first\.weight") as caught:
        train(optimizer, closure, 30)
    uses = [w for w in caught if "KFAC rejected" not in str(w.message)]
    assert len(uses) == 1
    assert "last." not in str(uses[0].message)
