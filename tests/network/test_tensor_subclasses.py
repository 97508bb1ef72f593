"""Outputs that become tensors of another class on their way to the loss.

`as_subclass`, and the constructor of a class, give a new tensor with the same data. Torch shows that to no
`TorchFunctionMode`, and the model's own tensor may be gone by then.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import KFAC, Intervals
from tests.conftest import ALGEBRA, mlp, normal
from tests.network.test_recorder import assert_loss, recorded

X, Y = normal(6, 3), normal(6, 2, seed=1)
LOSS = nn.MSELoss()


class Labelled(Tensor):
    """Columns have names, as in PINA's tensors."""

    labels: str

    def pick(self, name: str) -> "Labelled":
        plain = self.as_subclass(Tensor).as_subclass(Tensor)
        return labelled(plain[:, self.labels.index(name)].unsqueeze(1), name)


class Scaled(Tensor):
    """A class that passes functions on by itself."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def labelled(z: Tensor, names: str = "uv") -> Labelled:
    result = z.as_subclass(Labelled)
    result.labels = names
    return result


MADE = {
    "as a subclass": labelled,
    "by the constructor": Labelled,
    "of a class with functions of its own": lambda z: z.as_subclass(Scaled),
    "and plain again": lambda z: labelled(z).as_subclass(Tensor),
}


def residual(z: Tensor) -> Tensor:
    r = z.pick("v") - 3 * z.pick("u") ** 2
    return LOSS(r, torch.zeros_like(r))


def elements(z: Tensor) -> Tensor:
    return nn.MSELoss(reduction="none")(z, labelled(Y)).mean()


LOSSES = {name: lambda z, made=made: LOSS(made(z), Y) for name, made in MADE.items()} | {
    "of columns by name": lambda z: residual(labelled(z)).as_subclass(Tensor),
    "averaged afterwards": lambda z: elements(labelled(z)).as_subclass(Tensor),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_loss_of_outputs_in_another_class_is_done_again(loss):
    model = mlp([3, 4, 2])
    batch = recorded(model, LOSS, lambda: loss(model(X)))
    assert batch.seen
    assert_loss(batch, model, loss(model(X)))


@pytest.mark.parametrize("with_closure", [True, False])
def test_the_step_is_that_of_plain_tensors(with_closure):
    def steps(made):
        model = mlp([3, 4, 2])
        optimizer = KFAC(model, LOSS, fisher="exact")
        for step in range(8):
            x = normal(6, 3, seed=step)

            def closure(x=x):
                optimizer.zero_grad()
                loss = LOSS(made(model(x)), x[:, :2].sin())
                loss.backward()
                return loss

            if with_closure:
                optimizer.step(closure)
            else:
                closure()
                optimizer.step()
            assert optimizer.report.events == ()
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert_close(steps(labelled), steps(lambda z: z), **ALGEBRA)


class Careful(Tensor):
    """What torch's functions return has no names, and some methods need them, as in PINA's tensors."""

    labels: str

    def to(self, *given, **named):  # type: ignore[override]
        result = super().to(*given, **named)
        result.labels = self.labels
        return result

    def clone(self, *given, **named):  # type: ignore[override]
        return careful(super().clone(*given, **named), self.labels)

    def requires_grad_(self, mode: bool = True) -> "Careful":
        result = super().requires_grad_(mode)
        result.labels = self.labels
        return result


def careful(x: Tensor, names: str = "xyz") -> Tensor:
    result = x.as_subclass(Careful)
    result.labels = names
    return result


class ByName(nn.Module):
    """A model that picks its inputs by their names."""

    def __init__(self, names: str) -> None:
        super().__init__()
        self.labels = names
        self.network = mlp([2, 4, 2])

    def forward(self, x: Tensor) -> Tensor:
        columns = [x.labels.index(name) for name in self.labels]  # type: ignore[attr-defined]
        result: Tensor = self.network(x[:, columns])
        return result


class Columns(nn.Module):
    def __init__(self, columns: list[int]) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.columns]


def test_a_model_that_is_given_such_tensors_and_needs_their_names():
    def steps(model, made):
        optimizer = KFAC(model, LOSS, intervals=Intervals(0.5, 0.5))
        torch.manual_seed(0)
        for step in range(8):
            x, y = normal(12, 3, seed=step), normal(12, 2, seed=20 + step)

            def closure(x=x, y=y):
                optimizer.zero_grad()
                loss = LOSS(model(made(x)), made(y)).as_subclass(Tensor)
                loss.backward()
                return loss

            optimizer.step(closure)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    plain = mlp([2, 4, 2])
    expected = steps(nn.Sequential(Columns([2, 0]), plain), lambda x: x)
    assert_close(steps(ByName("zx"), careful), expected, **ALGEBRA)
