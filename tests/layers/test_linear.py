import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kronfac.errors import UnsupportedModelError
from kronfac.layers import LinearLayer
from tests.conftest import ALGEBRA, mlp, normal
from tests.reference import dense

each_bias = pytest.mark.parametrize("bias", [True, False])


def layer_of(bias: bool) -> LinearLayer:
    return LinearLayer("hidden", mlp([4, 3], bias=bias)[0])


@each_bias
def test_its_matrix_times_its_inputs_is_what_the_module_computes(bias):
    """s = W ā."""
    layer = layer_of(bias)
    x = normal(5, 4)
    W = layer.join(layer.parameters())
    assert W.shape == layer.shape == (3, 4 + bias)
    assert torch.equal(W, dense.layer_matrices(layer.module)[0])
    a = layer.inputs(x)
    assert a.shape == (5, 1, 4 + bias)
    assert_close(a.squeeze(1) @ W.mT, layer.module(x), **ALGEBRA)


@each_bias
def test_join_and_split_are_inverse(bias):
    layer = layer_of(bias)
    V = normal(3, 4 + bias)
    parts = layer.split(V)
    assert [part.shape for part in parts] == [p.shape for p in layer.parameters()]
    assert torch.equal(layer.join(parts), V)
    for part, parameter in zip(
        layer.split(layer.join(layer.parameters())), layer.parameters(), strict=True
    ):
        assert torch.equal(part, parameter)


@each_bias
def test_gradients_of_the_parameters_are_output_gradients_times_inputs(bias):
    """∇_W = Σ g āᵀ [MG15 §3]."""
    layer = layer_of(bias)
    x, g = normal(5, 4), normal(5, 3, seed=1)
    grads = torch.autograd.grad(layer.module(x), layer.parameters(), g)
    product = layer.output_grads(g).flatten(0, 1).mT @ layer.inputs(x).flatten(0, 1)
    assert_close(product, layer.join(grads), **ALGEBRA)


@each_bias
def test_names(bias):
    module = nn.Linear(2, 2, bias=bias)
    suffixes = ["weight", "bias"][: 1 + bias]
    assert LinearLayer("a.b", module).parameter_names() == [f"a.b.{s}" for s in suffixes]
    assert LinearLayer("", module).parameter_names() == suffixes


@pytest.mark.parametrize("shape", [(4,), (2, 5, 4)])
def test_anything_but_a_batch_of_vectors_is_refused(shape):
    layer = layer_of(True)
    with pytest.raises(UnsupportedModelError, match="the inputs of layer 'hidden' have shape"):
        layer.inputs(torch.zeros(shape))
    with pytest.raises(UnsupportedModelError, match="the outputs of layer 'hidden' have shape"):
        layer.output_grads(torch.zeros(shape))
