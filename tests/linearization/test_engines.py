"""f, J v and Jᵀ r by every engine, against the dense Jacobian."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac.curvature import SummedGradient
from kronfac.linearize import ByHand, Traced
from kronfac.linearize.base import SHARE, by_differences, by_forward_mode, outputs_and_jvp
from kronfac.linearize.by_hand import outputs_at, trace_of
from kronfac.linearize.elementwise import ELEMENTWISE
from kronfac.model import Network
from kronfac.objective import Gaussian
from kronfac.record import Pass, record
from kronfac.record.discovery import discover
from tests.conftest import ALGEBRA, mlp, network_of, normal

EXACT = {"rtol": 1e-9, "atol": 1e-11}
"""Tolerance of engines that differentiate."""
DIFFERENCES = {"rtol": 1e-7, "atol": 1e-8}
"""Tolerance of central differences in float64, whose ε is 4e-7 of ‖θ‖/‖v‖: ε² and 1e-16/ε."""


def engine_jvp(network, part, directions):
    return outputs_and_jvp(network, part, directions)[1]


def forward_jvp(network, part, directions):
    return by_forward_mode(network, part, directions)[1]


def difference_jvp(network, part, directions):
    return by_differences(network, part, directions)[1]


class Residual(nn.Module):
    """A layer used twice, a tied weight, a scale of its own, sequences."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = mlp([3, 3])[0], mlp([3, 3], seed=1)[0]
        self.out.weight = self.inner.weight
        self.scale = nn.Parameter(normal(3, seed=2))

    def forward(self, x):
        h = x + torch.tanh(self.inner(x))
        h = torch.tanh(self.inner(h)) * self.scale
        return self.out(h)


class OutsideItsModule(nn.Module):
    """An autoencoder whose decoder is the encoder's weight."""

    def __init__(self):
        super().__init__()
        self.encoder = mlp([3, 2])[0]

    def forward(self, x):
        return torch.sigmoid(self.encoder(x)) @ self.encoder.weight


class Constants(nn.Module):
    """Scaled by a number that is computed from a parameter and from activations, without gradients."""

    def __init__(self):
        super().__init__()
        self.layer = mlp([3, 2])[0]

    def forward(self, x):
        z = self.layer(x)
        with torch.no_grad():
            size = torch.empty((), dtype=z.dtype)
            torch.sum(self.layer.weight.square(), dim=(0, 1), out=size)
            size += z.square().mean()
        return torch.tanh(z) / size


@dataclass(frozen=True)
class Problem:
    """A model, and what happens between it and the loss."""

    model: Callable[[], nn.Module]
    x: Tensor
    then: Callable[[Tensor], Tensor] | None = None
    """What is done to the model's outputs before the loss."""

    def network(self) -> tuple[Network, Pass]:
        """The network, and one pass that was recorded."""
        model = self.model().double()
        network = network_of(model)
        with record(model, network.objective) as recording:
            z = model(self.x)
            z = z if self.then is None else self.then(z)
            Gaussian()(z, torch.zeros_like(z)).backward()
        for p in model.parameters():
            p.grad = None
        (part,) = recording.batch().passes
        return discover(network, part), part


def functions(kind: type[nn.Module]) -> Problem:
    """A perceptron with this function behind two of its layers."""
    return Problem(
        lambda: nn.Sequential(mlp([3, 6]), kind(), mlp([6, 4]), kind(), mlp([4, 2])), normal(5, 3)
    )


PERCEPTRONS = {
    "perceptron": Problem(lambda: mlp([3, 4, 2]), normal(5, 3)),
    "no biases": Problem(lambda: mlp([3, 4, 2], bias=False), normal(5, 3)),
    "one layer": Problem(lambda: nn.Linear(3, 2), normal(5, 3)),
    "functions in front, behind, two in a row and none": Problem(
        lambda: nn.Sequential(
            nn.Softplus(), mlp([3, 6]), nn.Tanh(), nn.Sigmoid(), mlp([6, 4]), mlp([4, 2]), nn.SiLU()
        ),
        normal(5, 3),
    ),
    "another GELU": Problem(
        lambda: nn.Sequential(mlp([3, 6]), nn.GELU(approximate="tanh"), mlp([6, 2], bias=False)),
        normal(5, 3),
    ),
    "dropout": Problem(
        lambda: nn.Sequential(
            nn.Dropout(0.2), mlp([3, 6]), nn.Tanh(), nn.Dropout(0.5), mlp([6, 2])
        ),
        normal(5, 3),
    ),
    "dropout that is switched off": Problem(
        lambda: nn.Sequential(mlp([3, 6]), nn.Dropout(0.5), mlp([6, 2])).eval(), normal(5, 3)
    ),
}
PROBLEMS = PERCEPTRONS | {
    "sequences": Problem(lambda: mlp([3, 4, 2]), normal(5, 2, 3)),
    "flattened sequences": Problem(
        lambda: mlp([3, 4, 2]), normal(5, 2, 3), lambda z: z.reshape(-1, 2)
    ),
    "shared weights": Problem(Residual, normal(5, 2, 3)),
    "a weight outside its module": Problem(OutsideItsModule, normal(5, 3)),
    "layer normalisation": Problem(
        lambda: nn.Sequential(mlp([3, 4]), nn.LayerNorm(4), nn.GELU(), mlp([4, 2])), normal(5, 3)
    ),
    "batch normalisation": Problem(
        lambda: nn.Sequential(mlp([3, 4]), nn.BatchNorm1d(4), nn.Tanh(), mlp([4, 2])), normal(5, 3)
    ),
    "convolution": Problem(
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3)),
        normal(4, 1, 4, 4),
    ),
    "recurrent": Problem(
        lambda: nn.GRU(3, 2, batch_first=True), normal(4, 3, 3), lambda out: out[0][:, -1]
    ),
    "frozen layer": Problem(
        lambda: nn.Sequential(
            mlp([3, 4]), nn.Tanh(), mlp([4, 4]).requires_grad_(False), mlp([4, 2])
        ),
        normal(5, 3),
    ),
}
FUNCTIONS = {
    kind.__name__: functions(kind)
    for kind in sorted(ELEMENTWISE - {nn.Dropout}, key=lambda kind: kind.__name__)
}
each_problem = pytest.mark.parametrize("name", PROBLEMS)


def dense_jacobian(network: Network, part: Pass) -> Tensor:
    """∂z/∂θ, (outputs, parameters), one output at a time by reverse mode."""
    (z,) = part.run(network.model)
    rows = []
    for output in part.terms[0].matrix(z).reshape(-1):
        grads = torch.autograd.grad(
            output, network.parameters, retain_graph=True, materialize_grads=True, allow_unused=True
        )
        rows.append(torch.cat([g.reshape(-1) for g in grads]))
    return torch.stack(rows)


def directions_of(network: Network, count: int = 2) -> list[tuple[Tensor, ...]]:
    return [
        tuple(normal(*unit.shape, seed=10 * k + n) for n, unit in enumerate(network.units))
        for k in range(count)
    ]


def flat(network: Network, vector) -> Tensor:
    return torch.cat([part.reshape(-1) for part in network.split(vector)])


def test_forward_mode_takes_what_has_no_gradients_for_a_constant():
    """As backward mode does; `out=` would have no forward-mode derivative besides."""
    network, part = Problem(Constants, normal(5, 3)).network()
    J = dense_jacobian(network, part)
    v = tuple(normal(*unit.shape, seed=n) for n, unit in enumerate(network.units))
    (Jv,) = forward_jvp(network, part, [v])
    flat = torch.cat([t.reshape(-1) for t in network.split(v)])
    assert_close(part.terms[0].matrix(Jv)[0].reshape(-1), J @ flat, **EXACT)
    assert not any(t.requires_grad for t in by_forward_mode(network, part, [v])[0])


@pytest.mark.parametrize("name", PROBLEMS | FUNCTIONS)
def test_outputs_and_products_with_the_jacobian_and_its_transpose(name):
    """By torch and, for perceptrons, by hand. Taps add up to Jᵀ r: Σ g āᵀ, or the sum itself."""
    network, part = (PROBLEMS | FUNCTIONS)[name].network()
    J, trace = dense_jacobian(network, part), trace_of(network, part)
    assert (trace is not None) == (name in PERCEPTRONS | FUNCTIONS)
    (z,), (terms,) = part.run(network.model), part.terms
    directions, r = directions_of(network), normal(terms.count, terms.event, seed=3)
    wanted = J.mT @ r.reshape(-1)
    for view in [Traced(network, part)] + ([] if trace is None else [ByHand(part, trace)]):
        (outputs,), (tangents,) = view.outputs, view.jvp(directions)
        assert not outputs.requires_grad
        assert_close(outputs, terms.matrix(z.detach()), **ALGEBRA)
        for tangent, v in zip(tangents, directions, strict=True):
            assert_close(tangent.reshape(-1), J @ flat(network, v), **EXACT)
        found = view.vjp([r])
        assert_close(flat(network, found), wanted, **EXACT)
        for unit, taps, V in zip(network.units, view.taps([r]), found, strict=True):
            assert unit.observed or isinstance(taps, SummedGradient)
            if isinstance(taps, SummedGradient):
                assert_close(taps.V, V, **EXACT)
            else:
                own = sum((tap.gradients().sum(dim=0) for tap in taps), torch.zeros_like(V))
                assert_close(own, V, **EXACT)
    assert network.learned.forward_mode
    if trace is not None:
        assert torch.equal(trace.outputs, z)
        moved = outputs_at(network, part, directions[0])
        with network.displaced(directions[0]):
            assert_close(moved, part.run(network.model)[0].detach(), rtol=1e-12, atol=1e-12)


@each_problem
def test_products_with_the_jacobian_by_finite_differences(name):
    network, part = PROBLEMS[name].network()
    J = dense_jacobian(network, part)
    directions = directions_of(network)
    before = [p.detach().clone() for p in network.parameters]
    (raw,) = difference_jvp(network, part, directions)
    found = part.terms[0].matrix(raw)
    terms = part.terms[0]
    assert found.shape == (2, terms.count, terms.event)
    for tangent, v in zip(found, directions, strict=True):
        assert_close(tangent.reshape(-1), J @ flat(network, v), **DIFFERENCES)
    assert all(torch.equal(p, q) for p, q in zip(network.parameters, before, strict=True))
    assert all(p.grad is None for p in network.model.parameters())


@pytest.mark.parametrize("name", ["perceptron", "shared weights"])
def test_finite_differences_in_single_precision(name):
    """An error of the order of ε^⅔ = 2e-5, in units of the largest entry."""
    network, part = PROBLEMS[name].network()
    J = dense_jacobian(network, part)
    (v,) = directions_of(network, 1)
    expected = J @ flat(network, v)
    single = Problem(PROBLEMS[name].model, PROBLEMS[name].x.float())
    model = single.model().float()
    small = network_of(model)
    with record(model, small.objective) as recording:
        z = model(single.x)
        Gaussian()(z, torch.zeros_like(z)).backward()
    (part,) = recording.batch().passes
    (raw,) = difference_jvp(small, part, [tuple(V.float() for V in v)])
    error = (part.terms[0].matrix(raw)[0].reshape(-1).double() - expected).abs().max()
    assert error < 1e-3 * expected.abs().max()


def test_finite_differences_where_most_of_theta_is_scales_of_one():
    """Embeddings of size 0.02 beside LayerNorms: a difference must be small beside what it moves."""
    model = nn.Sequential(
        nn.Embedding(11, 32), *(nn.LayerNorm(32) for _ in range(5)), nn.Linear(32, 3)
    )
    with torch.no_grad():
        model[0].weight.mul_(0.02)
    network = network_of(model)
    tokens = torch.arange(11)
    with record(model, network.objective) as recording:
        Gaussian()(model(tokens), torch.zeros(11, 3)).backward()
    (part,) = recording.batch().passes
    v = tuple(normal(*V.shape, seed=n, dtype=V.dtype) for n, V in enumerate(network.theta()))
    (expected,) = forward_jvp(network, part, [v])
    (found,) = difference_jvp(network, part, [v])
    assert (found - expected).norm() < 2e-3 * expected.norm()


class NoForwardMode(torch.autograd.Function):
    """Has a backward pass and no forward-mode derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * (1 - x.tanh().square())


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = mlp([3, 4])[0], mlp([4, 2])[0]

    def forward(self, x):
        return self.second(NoForwardMode.apply(self.first(x)))


def test_without_forward_mode_differences_are_taken_from_then_on(monkeypatch):
    network, part = Problem(Opaque, normal(5, 3)).network()
    J = dense_jacobian(network, part)
    (v,) = directions_of(network, 1)
    with pytest.raises((RuntimeError, NotImplementedError)):
        forward_jvp(network, part, [v])
    for _ in range(2):
        (raw,) = engine_jvp(network, part, [v])
        assert_close(raw[0].reshape(-1), J @ flat(network, v), **DIFFERENCES)
        assert not network.learned.forward_mode
        monkeypatch.delattr(
            "kronfac.linearize.base.by_forward_mode", raising=False
        )  # not asked again


class Routed(Opaque):
    """An example goes another way on one side of an edge; `untruthful` has another gradient besides."""

    def __init__(self, untruthful: bool = False):
        super().__init__()
        self.edge, self.untruthful = torch.inf, untruthful

    def forward(self, x):
        s = self.first(x)
        h = NoForwardMode.apply(s)
        h = h + 0.1 * (h.detach() - h) if self.untruthful else h
        return self.second(torch.where(s[:, :1] > self.edge, -h, h))


def beside_an_edge(untruthful: bool) -> tuple[Network, Pass, tuple[Tensor, ...]]:
    """A problem and a direction in which the usual difference takes the first example across the edge."""
    network, part = Problem(lambda: Routed(untruthful), normal(5, 3)).network()
    (v,) = directions_of(network, 1)
    theta = flat(network, network.theta())
    epsilon = SHARE * torch.finfo(theta.dtype).eps ** (1 / 3) * theta.norm()
    epsilon = epsilon / flat(network, v).norm()
    weight, bias = network.split(v)[:2]
    x = normal(5, 3)[0]
    with torch.no_grad():
        score, speed = network.model.first(x)[0], weight[0] @ x + bias[0]
    network.model.edge = float(score + epsilon * speed / 2)
    return network, part, v


def test_differences_are_shorter_where_examples_go_another_way():
    network, part, v = beside_an_edge(False)
    J = dense_jacobian(network, part)
    (jumped,) = difference_jvp(network, part, [v])
    assert (jumped[0].reshape(-1) - J @ flat(network, v)).norm() > 1e3
    for _ in range(2):  # from then on
        (found,) = Traced(network, part).jvp([v])
        assert_close(found[0].reshape(-1), J @ flat(network, v), **DIFFERENCES)
        assert network.learned.difference == 0.125


def test_a_wrong_gradient_is_wrong_at_every_length():
    network, part, v = beside_an_edge(True)
    with pytest.warns(UserWarning, match="does not agree with the gradient"):
        Traced(network, part).jvp([v])
    assert network.learned.difference == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=["GPU", "CPU"],
)
def test_out_of_memory_once_is_not_for_good(error, monkeypatch):
    """Differences take less; the next pass, which may be smaller, is by forward mode again."""
    network, part = PROBLEMS["layer normalisation"].network()
    (v,) = directions_of(network, 1)
    (expected,) = engine_jvp(network, part, [v])

    def fails(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("kronfac.linearize.base.by_forward_mode", fails)
        (found,) = engine_jvp(network, part, [v])
    assert_close(found, expected, **DIFFERENCES)
    assert network.learned.forward_mode
    (again,) = engine_jvp(network, part, [v])
    assert torch.equal(again, expected)


def test_an_error_of_the_model_itself_is_raised():
    network, part = PROBLEMS["perceptron"].network()

    def broken(*args):
        raise RuntimeError("broken")

    network.model.forward = broken
    with pytest.raises(RuntimeError, match="broken"):
        engine_jvp(network, part, directions_of(network, 1))
    assert network.learned.forward_mode
