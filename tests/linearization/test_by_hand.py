"""Which models and calls have passes by hand, and what traces share. The truth is in test_engines.py."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from kronfac.linearize import ByHand, Trace, Traced, linearize
from kronfac.linearize.by_hand import outputs_at, trace_call, trace_of
from kronfac.model.side_effects import RandomState
from kronfac.record import Batch, LossCall, ModelCall, Pass, Ref, subsets
from kronfac.record.batch import Operation
from kronfac.record.examples import select
from tests.conftest import batch, network_of

ROWS, IN, OUT = 7, 5, 3


def call_of(x: Tensor) -> ModelCall:
    return ModelCall((x,), {}, outputs=(0,))


def inputs(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, IN, dtype=torch.float64, generator=generator)


def trace(model: nn.Module, x: Tensor) -> Trace:
    found = trace_call(network_of(model), call_of(x))
    assert found is not None
    return found


def test_a_trace_with_dropout_draws_the_masks_of_the_call() -> None:
    """In a part of the trace too; the global generator is left alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 6), nn.Dropout(0.5), nn.Linear(6, OUT)).double()
    network, x = network_of(model), inputs()
    (part,) = batch(network, x).passes
    state = RandomState.current(torch.device("cpu"))
    masked = replace(part, steps=(replace(part.calls[0], random=state),))
    expected, later = model(x), torch.get_rng_state()
    found = trace_of(network, masked)
    assert found is not None
    torch.testing.assert_close(found.outputs, expected.detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.get_rng_state(), later)
    delta = tuple(torch.randn_like(V) for V in network.theta())
    # Not to the bit: matrix products of other shapes may add in another order.
    (one,), (every,) = (t.pushforward([delta]) for t in (found.select(slice(2, 5)), found))
    torch.testing.assert_close(one, every[2:5], rtol=1e-12, atol=1e-12)


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
    "in place": lambda: nn.Sequential(nn.Linear(IN, 6), nn.ReLU(inplace=True), nn.Linear(6, OUT)),
    "a hook": hooked,
    "another forward function": patched,
    "a frozen layer": frozen,
    "a layer used twice": twice,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_are_left_to_torch(name: str) -> None:
    model = OTHERS[name]().double()
    x = inputs()
    network = network_of(model)
    assert trace_call(network, call_of(x)) is None
    assert isinstance(linearize(network, batch(network, x).passes[0]), Traced)


def test_other_calls_and_passes_are_left_to_torch() -> None:
    """Operations in between, two calls, two losses; other inputs; hooks of all modules."""
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT)).double()
    network, x = network_of(model), inputs()
    for call in (
        call_of(x.reshape(1, ROWS, IN)),
        ModelCall((), {"input": x}, outputs=(0,)),
        call_of(x.float()),
    ):
        assert trace_call(network, call) is None
    for register in (register_module_forward_hook, register_module_forward_pre_hook):
        with register(lambda *given: None):
            assert trace_call(network, call_of(x)) is None
    (plain,) = batch(network, x).passes
    assert trace_of(network, plain) is not None
    (call,), (loss,) = plain.calls, plain.losses
    doubled = Operation(torch.mul, (Ref(0), 2), {}, (1,))
    others = [
        Pass((call, doubled), (LossCall(1, loss.terms),)),
        Pass((call, replace(call, outputs=(1,))), (loss,)),
        Pass((call,), (loss, loss)),
    ]
    for part in others:
        assert trace_of(network, part) is None
        assert outputs_at(network, part, network.theta()) is None


@pytest.mark.parametrize("index", [range(3), [1, 4, 6]])
def test_the_trace_of_some_examples_is_part_of_that_of_all(index: range | list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT)).double()
    x, network = inputs(), network_of(model)
    (part,) = batch(network, x).passes
    kept = replace(part, steps=(replace(part.calls[0], trace=trace(model, x)),))
    chosen = index if isinstance(index, range) else torch.tensor(index)
    fewer = select(kept, chosen)
    found = trace_of(network, fewer)
    assert isinstance(found, Trace)
    assert found is fewer.calls[0].trace
    if isinstance(index, range):  # views, and what `subsets` gives
        assert found.inputs[0].data_ptr() == kept.calls[0].trace.inputs[0].data_ptr()
        (first,) = subsets(network, Batch((kept,)), [3], None)
        assert torch.equal(trace_of(network, first.passes[0]).outputs, found.outputs)
    alone = trace(model, x[list(index)])
    torch.testing.assert_close(found.outputs, alone.outputs)
    for left, right in zip(found.inputs, alone.inputs, strict=True):
        torch.testing.assert_close(left, right)
    v = torch.ones(3, OUT, dtype=torch.float64)
    for left, right in zip(found.backwards(v), alone.backwards(v), strict=True):
        torch.testing.assert_close(left[1:], right[1:])


def test_a_trace_that_is_kept_is_used() -> None:
    """Further passes over the same examples compute nothing anew: with another in its place they differ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT)).double()
    x, network = inputs(), network_of(model)
    (part,) = batch(network, x).passes
    other = replace(part, steps=(replace(part.calls[0], trace=trace(model, x + 1)),))
    (z,) = linearize(network, other).outputs
    torch.testing.assert_close(z, model(x + 1).detach())
    V = network.theta()
    (found,) = linearize(network, other).jvp([V])
    (expected,) = linearize(network, batch(network, x + 1).passes[0]).jvp([V])
    torch.testing.assert_close(found, expected)


def test_passes_leave_the_trace_as_it_was() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(IN, 6), nn.Tanh(), nn.Linear(6, OUT), nn.SiLU()).double()
    kept = trace(model, inputs())
    (part,) = batch(network_of(model), inputs()).passes
    view = ByHand(part, kept)
    tensors = [*kept.inputs, *(s.tensor for s in kept.slopes if s is not None), kept.outputs]
    before = [t.clone() for t in tensors]
    v = torch.ones(ROWS, OUT, dtype=torch.float64)
    directions = [tuple(torch.ones(u.shape, dtype=torch.float64) for u in kept.units)] * 2
    for _ in range(2):
        view.taps([v])
        view.vjp([v])
        view.jvp(directions)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    assert bool((v == 1).all())
    assert not any(t.requires_grad for t in tensors)


def test_a_dead_unit_passes_nothing_on_however_large() -> None:
    """As torch has it; a product with the slope 0 would be NaN."""
    model = nn.Sequential(nn.Linear(IN, 6), nn.ReLU(), nn.Linear(6, OUT))
    nn.init.constant_(model[0].bias, -100.0)
    kept = trace(model, inputs().float())
    V = [torch.zeros(u.shape) for u in kept.units]
    V[0][:, -1] = torch.inf
    assert bool((kept.pushforward([tuple(V)]) == 0).all())
