"""What every kind of layer is tested for: its uses against autograd's gradients, one example at a time.

Models take (examples, …) and return (examples, outputs), in float64.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.curvature import KroneckerBlock
from kronfac.linearize import Traced
from kronfac.model import Blocks, Network, find_units, record_uses
from kronfac.record.discovery import discover
from kronfac.record.examples import check_examples
from tests.conftest import ALGEBRA, AUTODIFF, batch, network_of, normal
from tests.layers.problems import Problem


def traced(network: Network, x: Tensor) -> Traced:
    """The network around θ on these examples."""
    (part,) = check_examples(network, batch(network, x)).passes
    return Traced(network, part)


def assert_uses(model: nn.Module, x: Tensor) -> Network:
    """Outputs are torch's, and gradients rebuilt from uses are autograd's: in all, and of every example."""
    network = network_of(model)
    with torch.enable_grad(), record_uses(network.sites, network.units, len(x)) as seen:
        outputs = model(x)
    expected = model(x)
    assert_close(outputs, expected, **ALGEBRA)
    assert not seen.unseen
    r = normal(*expected.shape, seed=1)
    view = traced(network, x)
    total = _gradient(network, expected, r)
    for V, W in zip(view.vjp([r]), total, strict=True):
        assert_close(V, W, **AUTODIFF)
    taps = view.taps([r])
    for unit, uses, V in zip(network.units, taps, total, strict=True):
        assert uses, unit.name
        assert_close(sum(tap.total() for tap in uses), V, **AUTODIFF)
    for n in range(len(x)):
        own = _gradient(network, model(x[n : n + 1]), r[n : n + 1])
        for unit, uses, V in zip(network.units, taps, own, strict=True):
            assert {tap.examples for tap in uses} == {len(x)}, unit.name
            assert_close(sum(tap.gradients()[n] for tap in uses), V, msg=unit.name, **AUTODIFF)
    find_units(model, Blocks(unsupported="refuse"))  # does not refuse
    (part,) = batch(network, x).passes
    found = discover(network, part)
    assert [u.observed for u in found.units] == [True] * len(found.units)
    assert [u.block for u in found.units] == [u.block for u in network.units]
    return network


def _gradient(network: Network, outputs: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    grads = torch.autograd.grad(
        outputs, network.parameters, r, allow_unused=True, materialize_grads=True
    )
    return tuple(network.join(grads))


def assert_exact(problem: Problem) -> None:
    """Every block is a Kronecker block and the dense Fisher's own."""
    for unit, moments in zip(problem.network.units, problem.curvature().blocks, strict=True):
        assert isinstance(unit.block, KroneckerBlock), unit
        v = problem.truth.vectors(unit)
        assert_close(moments.dense(), v.mT @ v, **AUTODIFF)


def fixed(model: nn.Module, loss: nn.Module, blocks: Blocks | None = None) -> kronfac.KFAC:
    """An optimizer whose steps depend on nothing but the curvature."""
    return kronfac.KFAC(
        model,
        loss,
        fisher="exact",
        damping=kronfac.FixedDamping(0.1),
        gamma=kronfac.FixedGamma(),
        step_rule=kronfac.QuadraticModel(bounded=False, memory=None),
        intervals=kronfac.Intervals(1.0, 1.0, inverse_interval=1),
        blocks=blocks or Blocks(),
    )


def assert_same_steps(
    first: nn.Module,
    second: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: nn.Module,
    blocks: Blocks | None = None,
) -> None:
    """Two ways to write a network take the same three steps; their parameters come in the same order."""
    names, own = zip(*first.named_parameters(), strict=True)
    pairs = list(zip(names, own, second.parameters(), strict=True))
    for name, p, q in pairs:
        assert_close(p, q.view(p.shape), rtol=0, atol=0, msg=name)
    assert_close(first(x), second(x), **ALGEBRA)
    start = [p.detach().clone() for p in own]
    optimizers = [fixed(model, loss, blocks) for model in (first, second)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step(optimizer.closure(x, y))
            assert optimizer.report.events == ()
        for name, p, q in pairs:
            assert_close(p, q.view(p.shape), rtol=1e-6, atol=1e-8, msg=name)
    assert all(not torch.equal(p, old) for p, old in zip(own, start, strict=True))


def train(
    model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, steps: int = 5, **settings: Any
) -> tuple[kronfac.KFAC, list[float]]:
    """The optimizer after some steps in which all uses of parameters were seen, and the losses."""
    optimizer = kronfac.KFAC(model, loss, **settings)

    def closure() -> Tensor:
        optimizer.zero_grad()
        value: Tensor = loss(model(x), y)
        value.backward()
        return value

    losses = [float(optimizer.step(closure).detach()) for _ in range(steps)]
    assert all(unit.observed for unit in optimizer.network.units)
    return optimizer, losses
