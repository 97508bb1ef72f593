"""What every kind of layer is tested for: its uses against autograd's gradients, one example at a time.

Models take (examples, …) and return (examples, outputs), in float64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.testing import assert_close

import kronfac
from kronfac.curvature import Curvature, ExactFisher
from kronfac.curvature.estimate import Sample, estimate
from kronfac.linearize import Traced
from kronfac.model import Blocks, Network, find_units, record_uses
from kronfac.record.discovery import discover
from kronfac.record.examples import check_examples
from tests.conftest import ALGEBRA, AUTODIFF, batch, network_of, normal, seeded


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


def curvature(network: Network, x: Tensor) -> Curvature:
    """The exact Fisher's moments, as a mean over the examples."""
    (part,) = batch(network, x).passes
    sample = Sample([part], lambda p: Traced(network, p))
    blocks = [unit.block for unit in network.units]
    return estimate(sample, blocks, ExactFisher(), seeded())


def assert_twice_is_once(network: Network, x: Tensor) -> None:
    """Duplicating every example changes no factor."""
    pairs = zip(
        curvature(network, x).blocks, curvature(network, x.repeat(2, 1, 1)).blocks, strict=True
    )
    for once, twice in pairs:
        assert_close(twice.dense(), once.dense(), rtol=1e-9, atol=1e-12)


def dense_blocks(network: Network, x: Tensor) -> list[Tensor]:
    """JᵀJ / examples of every unit, over vec(V)."""
    outputs = network.model(x)
    rows = []
    for output in outputs.flatten():
        one = torch.zeros((), dtype=output.dtype)
        grads = torch.autograd.grad(
            output, network.parameters, one + 1, retain_graph=True, materialize_grads=True,
            allow_unused=True,
        )  # fmt: skip
        rows.append(network.join(grads))
    each = [torch.stack([V.mT.flatten() for V in unit]) for unit in zip(*rows, strict=True)]
    return [J.mT @ J / len(x) for J in each]


def assert_exact(network: Network, x: Tensor) -> None:
    """The blocks are those of the dense Fisher, as they are for one example with one place."""
    found = curvature(network, x).blocks
    for unit, moments, F in zip(network.units, found, dense_blocks(network, x), strict=True):
        assert_close(moments.dense(), F, msg=unit.name, **AUTODIFF)


def fixed(model: nn.Module, loss: nn.Module) -> kronfac.KFAC:
    """An optimizer whose steps depend on nothing but the curvature."""
    return kronfac.KFAC(
        model,
        loss,
        fisher="exact",
        damping=kronfac.FixedDamping(0.1),
        gamma=kronfac.FixedGamma(),
        step_rule=kronfac.QuadraticModel(bounded=False, memory=None),
        intervals=kronfac.Intervals(1.0, 1.0, inverse_interval=1),
    )


def assert_same_steps(
    first: nn.Module,
    second: nn.Module,
    x: Tensor,
    y: Tensor,
    loss: nn.Module,
    order: Sequence[int] | None = None,
) -> None:
    """Two ways to write a network take the same three steps.

    `order` has the places of the first one's parameters among those of the second, if they differ.
    """
    names, own = zip(*first.named_parameters(), strict=True)
    others = list(second.parameters())
    others = others if order is None else [others[n] for n in order]
    pairs = list(zip(names, own, others, strict=True))
    for name, p, q in pairs:
        assert_close(p, q.view(p.shape), rtol=0, atol=0, msg=name)
    assert_close(first(x), second(x), **ALGEBRA)
    start = [p.detach().clone() for p in own]
    optimizers = [fixed(model, loss) for model in (first, second)]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.step(optimizer.closure(x, y))
            assert optimizer.report.events == ()
        for name, p, q in pairs:
            assert_close(p, q.view(p.shape), rtol=1e-6, atol=1e-8, msg=name)
    assert all(not torch.equal(p, old) for p, old in zip(own, start, strict=True))


def losses(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, steps: int = 50) -> list[float]:
    """A run with the default rules on fixed data."""
    optimizer = kronfac.KFAC(model, loss)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = [float(optimizer.step(optimizer.closure(x, y))) for _ in range(steps)]
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    return found
