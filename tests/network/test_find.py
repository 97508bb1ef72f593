import pytest
import torch
from torch import nn

from kronfac.errors import UnsupportedModelError
from kronfac.model import Blocks, find_units, record_uses
from tests.conftest import mlp


def names(model):
    return [unit.name for unit in find_units(model).units]


def kinds(model):
    """The name and the kind of block of every unit."""
    units = find_units(model).units
    return {unit.name: type(unit.block).__name__.removesuffix("Block") for unit in units}


def test_units_come_in_the_order_of_registration_with_their_paths():
    model = nn.Sequential(
        nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.ModuleDict({"head": nn.Linear(3, 1)})
    )
    assert names(model) == ["0.0", "1.head"]
    assert set(kinds(model).values()) == {"Kronecker"}


def test_parameter_names_are_those_of_the_model():
    model = nn.Sequential(mlp([2, 3, 1]), nn.Linear(1, 1, bias=False))
    units = find_units(model).units
    found = [name for unit in units for name in unit.names]
    assert found == [name for name, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    for unit in units:
        for name, parameter in zip(unit.names, unit.parameters, strict=True):
            assert parameters[name] is parameter


@pytest.mark.parametrize("layer", [nn.Linear(3, 3), nn.LayerNorm(3)], ids=str)
def test_frozen_layers_are_left_out(layer):
    model = nn.Sequential(nn.Linear(2, 3), layer.requires_grad_(False), nn.Linear(3, 1))
    assert names(model) == ["0", "2"]


def test_a_module_that_is_registered_twice_is_one_unit():
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


# ------------------------------------------------------------------- what each parameter gets


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # A weight with a bias in each of its two layers: a unit of its own.
        (tied, {"0.bias": "Kronecker", "0.weight": "Kronecker", "2.bias": "Kronecker"}),
        (lambda: half_frozen("weight"), {"0": "Kronecker", "2": "Kronecker"}),
        (lambda: half_frozen("bias"), {"0": "Kronecker", "2": "Kronecker"}),
        (
            lambda: nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)),
            {"0": "Kronecker", "1": "Dense"},
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 1)),
            {"0": "Dense", "1": "Kronecker"},
        ),
        (Scaled, {"scale": "Diagonal", "linear": "Kronecker"}),
        # A subclass may do anything in its forward.
        (lambda: Subclass(2, 2), {"weight": "Diagonal", "bias": "Diagonal"}),
        # Two adapters: what it needs shows in the first pass.
        (tied_to_an_embedding, {"0.weight": "Diagonal"}),
        (reparametrised, {"0.bias": "Diagonal", "0.weight_orig": "Diagonal"}),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
            {
                "0.bias": "Diagonal",
                "0.parametrizations.weight.original0": "Diagonal",
                "0.parametrizations.weight.original1": "Diagonal",
            },
        ),
    ],
)
def test_every_trained_parameter_is_in_one_unit(model, expected):
    model = model()
    assert kinds(model) == expected
    found = [id(p) for unit in find_units(model).units for p in unit.parameters]
    assert sorted(found) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_only_trained_parameters_are_columns_of_a_unit():
    weight_alone, bias_alone = (
        find_units(half_frozen(which)).units[0] for which in ("bias", "weight")
    )
    assert (weight_alone.names, weight_alone.shape) == (("0.weight",), (3, 2))
    assert (bias_alone.names, bias_alone.shape) == (("0.bias",), (3, 1))


def test_a_tied_weight_is_used_at_all_its_sites():
    model = tied()
    units = find_units(model).units
    number = [unit.names for unit in units].index(("0.weight",))
    with record_uses([], units, 4) as seen:
        model(torch.randn(4, 2))
    assert [len(uses) for uses in seen.uses.of] == [1, 2, 1] if number == 1 else [2, 1, 1]


def test_parameters_of_any_shape_are_matrices():
    model = nn.Sequential(nn.Conv2d(2, 3, (4, 5)), Scaled())
    shapes = {unit.name: unit.shape for unit in find_units(model).units}
    assert shapes["0"] == (3, 41)
    assert shapes["1.scale"] == (1, 1)


# ---------------------------------------------------------------------------------------- refusals


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripted_modules_are_refused():
    model = nn.Sequential(nn.Linear(2, 3), torch.jit.script(nn.Linear(3, 1)))
    with pytest.raises(UnsupportedModelError, match=r"'1' is compiled by torch\.jit"):
        find_units(model)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (tied_to_an_embedding, r"'0.weight' \(Embedding\)"),
        (Scaled, r"'scale' \(Scaled\)"),
        (lambda: Subclass(2, 2), r"'weight' \(Subclass\), 'bias' \(Subclass\)"),
        (
            lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))),
            r"'0.parametrizations.weight.original0' \(ParametrizationList\)",
        ),
        (reparametrised, r"'0.bias' \(Linear\), '0.weight_orig' \(Linear\)"),
    ],
)
def test_unknown_parameters_are_refused_if_asked_to(model, named):
    with pytest.raises(UnsupportedModelError, match=named):
        find_units(model(), Blocks(unsupported="refuse"))


def test_all_that_is_refused_is_named_at_once_with_what_can_be_done():
    model = nn.Sequential(
        Subclass(1, 2),
        nn.Sequential(Scaled(), nn.Linear(3, 3)),
        Subclass(2, 2, bias=False),
        Scaled().requires_grad_(False),
        Scaled(),
    )
    with pytest.raises(UnsupportedModelError) as refusal:
        find_units(model, Blocks(unsupported="refuse"))
    message = str(refusal.value)
    named = (
        "'0.weight' (Subclass), '0.bias' (Subclass), {}, '2.weight' (Subclass), '4.scale' (Scaled)."
    )
    assert named.format("'1.0.scale' (Scaled)") in message
    for remedy in ('unsupported="diagonal"', "kronfac.register", "requires_grad_(False)"):
        assert remedy in message
