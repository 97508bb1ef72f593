"""How often an ordinary step makes the host wait for the device.

There is no accelerator here: tensors say that they are on one, so that code for it runs, and every
operation that would wait for it is counted.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from kronfac import KFAC, AdaptiveDamping, Intervals
from tests.conftest import mlp, normal

WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2"}
"""`float`, `bool` and `item` are the first of them. The states of random generators are on the host."""


class Waits(TorchDispatchMode):
    """Counts what waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None) -> Any:
        self.count += func._schema.name in WAITING
        return func(*args, **(kwargs or {}))


def network(kind: str) -> tuple[nn.Module, Tensor]:
    if kind == "perceptron":
        return mlp([4, 12, 5], dtype=torch.float32), normal(32, 4, dtype=torch.float32)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5))
    return model, torch.randn(32, 1, 6, 6)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.CrossEntropyLoss()], ids=["mse", "classes"])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-3])
@pytest.mark.parametrize("way", ["closure", "own closure", "loop"])
@pytest.mark.parametrize("kind", ["perceptron", "convolutional"])
def test_an_ordinary_step_waits_twice(kind, way, weight_decay, loss, monkeypatch):
    """For the loss, which may call for a validation, and for the numbers of the quadratic model."""
    torch.manual_seed(0)
    model, x = network(kind)
    y = torch.arange(32) % 5
    if isinstance(loss, nn.MSELoss):
        y = nn.functional.one_hot(y, 5).float()
    damping, intervals = AdaptiveDamping(settling=3, interval=100), Intervals(inverse_interval=100)
    settings = {"weight_decay": weight_decay, "damping": damping, "intervals": intervals}
    optimizer = KFAC(model, loss, **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        return value

    def step() -> None:
        if way == "loop":
            closure()
        closures = {"closure": closure, "own closure": optimizer.closure(x, y), "loop": None}
        optimizer.step(closures[way])

    for _ in range(6):
        step()
    waits, of_list, to_host = Waits(), Tensor.tolist, Tensor.cpu

    def counted(tensor: Tensor) -> Tensor:
        waits.count += tensor.is_floating_point()  # the numbers of examples are drawn on the host
        return tensor

    monkeypatch.setattr(Tensor, "tolist", lambda self: of_list(counted(self)))
    monkeypatch.setattr(Tensor, "cpu", lambda self: to_host(counted(self)))
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda self: True))
    with waits:
        step()
    monkeypatch.undo()
    assert optimizer.report.next_rho is None, "not a step with a validation"
    assert waits.count <= 2
