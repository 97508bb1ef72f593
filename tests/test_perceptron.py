"""Passes by hand against torch's differentiation, and which models they are for."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from kronfac import KFAC, SampledFisher
from kronfac.layers import find_layers
from kronfac.minibatch import Batch, Call
from kronfac.perceptron import ELEMENTWISE, Perceptron, perceptron

ROWS, IN, OUT = 7, 5, 3


def call_of(x: Tensor, model: nn.Module, **kwargs: Tensor) -> Call:
    return Call(args=(x,), kwargs=dict(kwargs), rows=len(x), outputs=model(x, **kwargs).shape)


def inputs(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, IN, dtype=torch.float64, generator=generator)


def passed_through(model: nn.Module, x: Tensor) -> Perceptron:
    passed = perceptron(model, find_layers(model), call_of(x, model))
    assert passed is not None
    return passed


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """(rows, outputs, parameters) by reverse mode, parameters in the order of the layers."""
    parameters = [p for layer in find_layers(model) for p in layer.parameters()]
    rows = []
    for output in model(x).reshape(-1):
        grads = torch.autograd.grad(output, parameters, retain_graph=True)
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows).reshape(len(x), -1, sum(p.numel() for p in parameters))


def check_against_torch(model: nn.Module) -> None:
    model = model.double()
    x = inputs()
    passed = passed_through(model, x)
    layers = find_layers(model)
    torch.testing.assert_close(passed.outputs, model(x).detach(), rtol=0, atol=0)

    generator = torch.Generator().manual_seed(1)
    directions = [
        tuple(torch.randn(i.shape, dtype=torch.float64, generator=generator) for i in layers)
        for _ in range(2)
    ]
    J = jacobian(model, x)
    for direction, tangent in zip(directions, passed.pushforward(directions), strict=True):
        split = [i.split(V) for i, V in zip(layers, direction, strict=True)]
        flat = torch.cat([part.reshape(-1) for parts in split for part in parts])
        torch.testing.assert_close(tangent, J @ flat)

    v = torch.randn(passed.outputs.shape, dtype=torch.float64, generator=generator)
    # ∂/∂W of vᵀf is Σ g āᵀ: g is right where it gives the gradients.
    g = passed.pullback(v)
    expected = iter(torch.autograd.grad((model(x) * v).sum(), list(model.parameters())))
    gradient = passed.gradient(v)
    for layer, a, grad, V in zip(layers, passed.inputs, g, gradient, strict=True):
        wanted = layer.join([next(expected) for _ in layer.parameters()])
        torch.testing.assert_close(grad.mT @ layer.inputs(a).flatten(0, 1), wanted)
        torch.testing.assert_close(V, wanted)


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_every_function_is_differentiated_as_torch_does(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    check_against_torch(
        nn.Sequential(nn.Linear(IN, 6), kind(), nn.Linear(6, 4), kind(), nn.Linear(4, OUT))
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "one layer": lambda: nn.Linear(IN, OUT),
    "containers in containers": lambda: nn.Sequential(
        nn.Sequential(nn.Linear(IN, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, OUT))
    ),
    "functions in front, behind, two in a row and none": lambda: nn.Sequential(
        nn.Softplus(), nn.Linear(IN, 6), nn.Tanh(), nn.Sigmoid(), nn.Linear(6, 4), nn.Linear(4, OUT),
        nn.SiLU(),
    ),
    "dropout that is switched off": lambda: nn.Sequential(
        nn.Linear(IN, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, OUT)
    ).eval(),
    "no biases": lambda: nn.Sequential(
        nn.Linear(IN, 6, bias=False), nn.GELU(approximate="tanh"), nn.Linear(6, OUT, bias=False)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name: str) -> None:
    torch.manual_seed(0)
    check_against_torch(NETWORKS[name]())


class Wrapped(nn.Module):
    """The same network where nobody can look into it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Squared(nn.Tanh):
    """A subclass that does something else."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh().square()


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT))
    model[1].register_forward_hook(lambda module, args, output: 2 * output)
    return model


def pre_hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT))
    model.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    return model


def twice() -> nn.Module:
    layer = nn.Linear(IN, IN)
    return nn.Sequential(layer, nn.Tanh(), layer)


def frozen() -> nn.Module:
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, OUT))
    model[2].requires_grad_(False)
    return model


def patched() -> nn.Module:
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT))
    model[1].forward = torch.sin
    return model


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "a module of the user's own": lambda: Wrapped(nn.Linear(IN, OUT)),
    "a subclass": lambda: nn.Sequential(nn.Linear(IN, 6), Squared(), nn.Linear(6, OUT)),
    "a function of whole rows": lambda: nn.Sequential(
        nn.Linear(IN, 6), nn.Softmax(dim=1), nn.Linear(6, OUT)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(IN, 6), nn.Dropout(), nn.Linear(6, OUT)),
    "in place": lambda: nn.Sequential(nn.Linear(IN, 6), nn.ReLU(inplace=True), nn.Linear(6, OUT)),
    "a hook": hooked,
    "a hook of the whole": pre_hooked,
    "another forward function": patched,
    "a frozen layer": frozen,
    "a layer used twice": twice,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_torch(name: str) -> None:
    model = OTHERS[name]().double()
    x = inputs()
    assert perceptron(model, find_layers(model), call_of(x, model)) is None


def test_other_calls_are_left_to_torch() -> None:
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT)).double()
    layers, x = find_layers(model), inputs()
    assert perceptron(model, layers, call_of(x.reshape(1, ROWS, IN), model)) is None
    named = Call(args=(), kwargs={"input": x}, rows=ROWS, outputs=torch.Size((ROWS, OUT)))
    assert perceptron(model, layers, named) is None
    single = Call(args=(x.float(),), kwargs={}, rows=ROWS, outputs=torch.Size((ROWS, OUT)))
    assert perceptron(model, layers, single) is None


@pytest.mark.parametrize("inverse", ["block_diagonal", "block_tridiagonal"])
def test_a_run_is_the_same_either_way(inverse: str) -> None:
    x = inputs(3)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x.sum(dim=1)], dim=1)
    found = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, 4), nn.SiLU(), nn.Linear(4, OUT)
        )
        model = net.double() if by_hand else Wrapped(net).double()
        way = perceptron(model, find_layers(model), call_of(x, model))
        assert (way is not None) == by_hand
        optimizer = KFAC(model, nn.MSELoss(), inverse=inverse, fisher=SampledFisher(seed=4))
        for _ in range(6):
            optimizer.step(optimizer.closure(x, y))
        found.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    "register",
    [
        lambda: register_module_forward_hook(
            lambda module, args, out: 3 * out if isinstance(module, nn.Tanh) else None
        ),
        lambda: register_module_forward_pre_hook(lambda module, args: (2 * args[0],)),
    ],
    ids=["forward", "pre"],
)
def test_hooks_of_all_modules_are_torchs_affair(register: Callable[[], RemovableHandle]) -> None:
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT)).double()
    x, layers = inputs(), find_layers(model)
    call = call_of(x, model)
    handle = register()
    try:
        assert perceptron(model, layers, call) is None
    finally:
        handle.remove()
    assert perceptron(model, layers, call) is not None


def test_the_way_of_the_first_rows_is_part_of_that_of_all() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT)).double()
    x, layers = inputs(), find_layers(model)
    call = replace(call_of(x, model), way=passed_through(model, x))
    fewer = Batch((call,)).leading(3).calls[0]
    way = perceptron(model, layers, fewer)
    assert isinstance(way, Perceptron)
    assert way is fewer.way
    alone = passed_through(model, x[:3])
    torch.testing.assert_close(way.outputs, alone.outputs)
    for found, expected in zip(way.inputs, alone.inputs, strict=True):
        torch.testing.assert_close(found, expected)
    v = torch.ones(3, OUT, dtype=torch.float64)
    for found, expected in zip(way.pullback(v), alone.pullback(v), strict=True):
        torch.testing.assert_close(found, expected)


def test_passes_leave_the_way_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT), nn.SiLU()).double()
    passed = passed_through(model, inputs())
    tensors = [*passed.inputs, *(s.tensor for s in passed.slopes if s is not None), passed.outputs]
    before = [t.clone() for t in tensors]
    v = torch.ones(ROWS, OUT, dtype=torch.float64)
    directions = [tuple(torch.ones(i.shape, dtype=torch.float64) for i in passed.layers)] * 2
    for _ in range(2):
        passed.pullback(v)
        passed.gradient(v)
        passed.pushforward(directions)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert bool((v == 1).all())
    assert not any(t.requires_grad for t in tensors)


@pytest.mark.parametrize("function", [nn.ReLU, nn.Sigmoid, nn.Tanh])
def test_slopes_that_follow_from_the_next_layers_inputs_take_no_memory(
    function: type[nn.Module],
) -> None:
    model = nn.Sequential(nn.Linear(IN, 6), function(), nn.Linear(6, OUT), function()).double()
    passed = passed_through(model, inputs())
    met = [slope.tensor.data_ptr() for slope in passed.slopes if slope is not None]
    assert met == [passed.inputs[1].data_ptr(), passed.outputs.data_ptr()]


def test_a_dead_unit_passes_nothing_on_however_large() -> None:
    """As torch has it; a product with the slope 0 would be NaN."""
    model = nn.Sequential(nn.Linear(IN, 6), nn.ReLU(), nn.Linear(6, OUT))
    nn.init.constant_(model[0].bias, -100.0)
    passed = passed_through(model, inputs().float())
    V = [torch.zeros(i.shape) for i in passed.layers]
    V[0][:, -1] = torch.inf
    assert bool((passed.pushforward([tuple(V)]) == 0).all())
