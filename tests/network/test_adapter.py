"""The registry: which adapter a module gets."""

import pytest
import torch
from torch import nn

import kronfac
from kronfac.curvature import DenseBlock, KroneckerBlock
from kronfac.model import Use, find_units, registry
from kronfac.model.layers.linear import LinearAdapter


class Own(nn.Module):
    """s = W a, by another name."""

    def __init__(self):
        super().__init__()
        self.kernel = nn.Parameter(torch.ones(2, 3))

    def forward(self, x):
        return x @ self.kernel.mT


class Derived(Own):
    def forward(self, x):
        return super().forward(x).tanh()


class Adapter:
    def __init__(self, block=None):
        if block is not None:
            self.block = lambda module: block

    def parameters(self, module):
        return {"kernel": module.kernel}

    def uses(self, module, args, kwargs, output):
        return [Use({"kernel": args[0]}, output)]


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_ADAPTERS", dict(registry._ADAPTERS))


def block(model):
    (unit,) = find_units(model).units
    return unit.block


def test_what_is_registered_is_found_by_its_exact_type():
    assert not isinstance(block(Own()), KroneckerBlock)
    kronfac.register(Own, Adapter())
    assert block(Own()) == KroneckerBlock()
    assert not isinstance(block(Derived()), KroneckerBlock)


def test_subclasses_if_it_says_so():
    kronfac.register(Own, Adapter(), subclasses=True)
    assert block(Derived()) == KroneckerBlock()


def test_the_nearest_class_is_asked_first():
    kronfac.register(Own, Adapter(), subclasses=True)
    kronfac.register(Derived, Adapter(DenseBlock()))
    assert block(Derived()) == DenseBlock()
    assert block(Own()) == KroneckerBlock()


def test_the_last_registration_wins():
    kronfac.register(Own, Adapter())
    kronfac.register(Own, Adapter(DenseBlock()))
    assert block(Own()) == DenseBlock()


def test_it_is_read_when_a_network_is_made():
    found = find_units(Own())
    kronfac.register(Own, Adapter())
    assert not found.sites
    assert [site.name for site in find_units(Own()).sites] == [""]


def test_linear_layers_can_be_given_another_block():
    class Reduced(LinearAdapter):
        def block(self, module):
            return KroneckerBlock("reduce")

    kronfac.register(nn.Linear, Reduced())
    assert block(nn.Linear(2, 2)) == KroneckerBlock("reduce")


def test_a_block_has_to_be_one():
    kronfac.register(Own, Adapter("dense"))
    with pytest.raises(TypeError, match="has to return a block"):
        find_units(Own())


@pytest.mark.parametrize(
    ("kind", "adapter", "message"),
    [
        (Own(), Adapter(), "needs a module type"),
        (int, Adapter(), "needs a module type"),
        (Own, Adapter, "needs an adapter"),
        (Own, object(), "needs an adapter"),
    ],
)
def test_anything_else_is_refused(kind, adapter, message):
    with pytest.raises(TypeError, match=message):
        kronfac.register(kind, adapter)
