import pytest
import torch
from torch import nn

from kronfac.errors import UnsupportedModelError
from kronfac.layers import LinearLayer, find_layers
from tests.conftest import mlp


def names(model):
    return [layer.name for layer in find_layers(model)]


def test_layers_come_in_the_order_of_registration_with_their_paths():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.ModuleDict({"head": nn.Linear(3, 1)})
    )
    assert names(model) == ["0.0", "1.head"]
    assert all(isinstance(layer, LinearLayer) for layer in find_layers(model))


def test_a_bare_linear_is_a_model():
    layers = find_layers(nn.Linear(2, 3))
    assert layers[0].parameter_names() == ["weight", "bias"]


def test_parameter_names_are_those_of_the_model():
    model = nn.Sequential(mlp([2, 3, 1]), nn.Linear(1, 1, bias=False))
    found = [name for layer in find_layers(model) for name in layer.parameter_names()]
    assert found == [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    for layer in find_layers(model):
        for name, parameter in zip(layer.parameter_names(), layer.parameters(), strict=True):
            assert parameters[name] is parameter


def test_frozen_layers_are_left_out():
    model = mlp([2, 3, 3, 1])
    model[2].requires_grad_(False)
    assert names(model) == ["0", "4"]


def test_frozen_parameters_of_other_layers_are_no_obstacle():
    model = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3).requires_grad_(False), nn.Linear(3, 1))
    assert names(model) == ["0", "2"]


def test_a_module_that_is_registered_twice_is_one_layer():
    layer = nn.Linear(2, 2)
    assert names(nn.ModuleDict({"a": layer, "b": layer})) == ["a"]


def tied():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
    model[2].weight = model[0].weight
    return model


def tied_to_an_embedding():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    model[1].weight = model[0].weight
    return model


def half_frozen(which):
    model = mlp([2, 3, 1])
    getattr(model[0], which).requires_grad_(False)
    return model


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(()))


class Subclass(nn.Linear):
    def forward(self, x):
        return super().forward(x) ** 2


def reparametrised():
    # Keeps the type nn.Linear but computes its weight from `weight_orig` before each call.
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(3, 2)))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (tied, "layers '0' and '2' share a parameter"),
        (tied_to_an_embedding, "weight"),
        (lambda: half_frozen("weight"), "of layer '0' only one has requires_grad"),
        (lambda: half_frozen("bias"), "of layer '0' only one has requires_grad"),
        (
            lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)),
            "LayerNorm: '1.weight', '1.bias'",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 1)),
            "Conv2d: '0.weight', '0.bias'",
        ),
        (lambda: nn.Bilinear(2, 2, 1), "Bilinear: 'weight', 'bias'"),
        (Scaled, "Scaled: 'scale'"),
        (lambda: Subclass(2, 2), r"Subclass \(a subclass.*\): 'weight', 'bias'"),
        (lambda: nn.MultiheadAttention(4, 2), "'in_proj_weight'"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
            r"ParametrizationList \(reparametrised.*\): '0.parametrizations.weight.original0'",
        ),
        (reparametrised, r"Linear \(reparametrised.*\): '0.bias', '0.weight_orig'"),
        (nn.Tanh, "no trainable nn.Linear in Tanh"),
        (lambda: nn.Linear(2, 2).requires_grad_(False), "no trainable nn.Linear"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "real parameters in float32 or float64"),
        (lambda: nn.Linear(2, 2, dtype=torch.bfloat16), "float32 or float64.*autocast"),
    ],
)
def test_models_that_it_cannot_train_are_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message):
        find_layers(model())


def test_all_that_it_cannot_train_is_named_at_once_by_type_with_what_can_be_done():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)),
        nn.Conv2d(2, 2, 3, bias=False),
        nn.LayerNorm(3).requires_grad_(False),
        Scaled(),
    )
    with pytest.raises(UnsupportedModelError) as refusal:
        find_layers(model)
    rule, *types, remedy = str(refusal.value).splitlines()
    assert rule.startswith("KFAC trains nn.Linear layers;")
    assert types == [
        "  Conv2d: '0.weight', '0.bias', '2.weight'",
        "  LayerNorm: '1.0.weight', '1.0.bias'",
        "  Scaled: '4.scale'",
    ]
    assert "requires_grad_(False)" in remedy
    assert "nn.Linear" in remedy
