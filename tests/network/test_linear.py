"""nn.Linear as a unit, and its uses."""

import threading

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.linearize import Traced
from kronfac.model import Unit, find_units, record_uses
from tests.conftest import ALGEBRA, batch, mlp, network_of, normal
from tests.reference import dense

each_bias = pytest.mark.parametrize("bias", [True, False])
each_shape = pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4), (5, 2, 3, 4), (4,)], ids=str)


def unit_of(module: nn.Module) -> Unit:
    (unit,) = find_units(module).units
    return unit


def places(x):
    """(examples, places, features); without a first dimension there is one example."""
    return x.reshape(1, 1, -1) if x.dim() == 1 else x.reshape(len(x), -1, x.shape[-1])


@each_bias
@each_shape
def test_its_matrix_times_its_inputs_is_what_the_module_computes(bias, shape):
    """s = V ā at every place."""
    module, x = mlp([4, 3], bias=bias)[0], normal(*shape)
    unit = unit_of(module)
    V = unit.join(unit.parameters)
    assert V.shape == unit.shape == (3, 4 + bias)
    assert torch.equal(V, dense.layer_matrices(module)[0])
    with record_uses([], [unit], len(x)) as seen:
        s = module(x)
    (tap,) = seen.uses.taps(0, [torch.zeros_like(s)])
    assert tap.inputs.shape == (*places(x).shape[:2], 4 + bias)
    assert_close(tap.inputs @ V.mT, places(s), **ALGEBRA)


@each_bias
def test_join_and_split_are_inverse(bias):
    unit = unit_of(mlp([4, 3], bias=bias)[0])
    V = normal(3, 4 + bias)
    parts = unit.split(V)
    assert [part.shape for part in parts] == [p.shape for p in unit.parameters]
    assert all(part.untyped_storage().data_ptr() == V.data_ptr() for part in parts)
    assert torch.equal(unit.join(parts), V)
    for part, parameter in zip(
        unit.split(unit.join(unit.parameters)), unit.parameters, strict=True
    ):
        assert torch.equal(part, parameter)


def test_inputs_by_keyword():
    module, x = mlp([4, 3])[0], normal(5, 4)
    with record_uses([], [unit_of(module)], 5) as seen:
        module(input=x)
    (tap,) = seen.uses.taps(0, [None])
    assert torch.equal(tap.inputs[:, 0, :4], x)


def test_another_thread_is_not_recorded():
    module, x = mlp([4, 3])[0], normal(5, 4)
    with record_uses([], [unit_of(module)], 5) as seen:
        thread = threading.Thread(target=module, args=(x,))
        thread.start()
        thread.join()
    assert seen.uses.of == [[]]
    assert not module._forward_hooks


@each_bias
def test_names(bias):
    module = nn.Linear(2, 2, bias=bias)
    suffixes = ["weight", "bias"][: 1 + bias]
    unit = unit_of(nn.ModuleDict({"a": nn.ModuleDict({"b": module})}))
    assert unit.name == "a.b"
    assert list(unit.names) == [f"a.b.{s}" for s in suffixes]
    assert list(unit_of(module).names) == suffixes


# ------------------------------------------------------------------------------ several uses of a unit


class Spare(nn.Module):
    """A layer that is called in vain, and one that is not called."""

    def __init__(self):
        super().__init__()
        self.used, self.vain, self.spare = (mlp([3, 3], seed=seed)[0] for seed in range(3))

    def forward(self, x):
        self.vain(x)
        return self.used(x)


def test_gradients_of_every_example_are_rebuilt_from_the_uses():
    """Of layers without uses too: Σ_uses g āᵀ is the example's own gradient, by autograd."""
    network = network_of(Spare())
    x, r = normal(5, 3), normal(5, 3, seed=1)
    (part,) = batch(network, x).passes
    taps = Traced(network, part).taps([r])
    for n in range(5):
        total = (network.model(x[n : n + 1]) * r[n]).sum()
        grads = torch.autograd.grad(
            total, network.parameters, allow_unused=True, materialize_grads=True
        )
        for V, unit in zip(network.join(grads), taps, strict=True):
            own = sum((tap.gradients()[n] for tap in unit), torch.zeros_like(V))
            assert_close(own, V, **ALGEBRA)
    assert not any(module._forward_hooks for module in network.model.modules())
