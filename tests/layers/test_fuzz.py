"""Random small networks: what K-FAC sees of every one is what autograd says."""

import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close

from kronfac import KFAC, Blocks
from kronfac.curvature import SummedGradient
from kronfac.linearize import Traced, fisher_gram
from kronfac.model import Network
from tests.conftest import AUTODIFF, normal
from tests.layers.architectures import Architecture, architectures
from tests.layers.modules import PositionTable
from tests.layers.problems import Problem, classification, regression

INSIDE = (nn.RNNBase, nn.MultiheadAttention)
ZERO = 1e-14
"""A gradient of this size is rounding."""


def assert_nothing_falls_back_in_silence(spec: Architecture, network: Network) -> None:
    for unit in network.units:
        expected = any(name == "einsum" for name in spec.layers) and unit.shape == (3, 3)
        if not unit.observed:
            assert unit.why, f"{unit} has no reason"
            assert expected or spec.tied_head, f"{unit} is not observed: {unit.why}"


def assert_gradient_is_rebuilt(problem: Problem) -> None:
    network, (part,) = problem.network, problem.batch.passes
    with torch.enable_grad():
        z = problem.outputs()
        h = problem.loss(z, problem.y)
    (slope,) = torch.autograd.grad(h, z, retain_graph=True)
    grads = torch.autograd.grad(h, network.parameters, allow_unused=True)
    filled = [
        torch.zeros_like(p) if g is None else g
        for g, p in zip(grads, network.parameters, strict=True)
    ]
    for taps, V in zip(
        Traced(network, part).taps([part.terms[0].matrix(slope)]), network.join(filled), strict=True
    ):
        rebuilt = taps.V if isinstance(taps, SummedGradient) else sum(tap.total() for tap in taps)
        assert_close(rebuilt + torch.zeros_like(V), V, **AUTODIFF)


def assert_fisher_products_are_the_fishers(problem: Problem) -> None:
    network = problem.network
    F = problem.truth.fisher(network.units)
    vectors = [tuple(normal(*unit.shape, seed=seed) for unit in network.units) for seed in range(2)]
    flat = torch.stack([torch.cat([V.mT.reshape(-1) for V in v]) for v in vectors])
    gram = fisher_gram(network, problem.batch, vectors)
    assert_close(gram, flat @ F @ flat.mT, **AUTODIFF)


def assert_blocks_are_their_definitions(problem: Problem) -> None:
    curvature = problem.curvature()
    modules = list(problem.model.modules())
    # The square of a sum with random signs: an estimate, see test_other_uses.py.
    summed = {id(m.table.weight) for m in modules if isinstance(m, PositionTable)}
    # Products inside of a module: see test_attention.py and test_recurrent.py.
    inside = {id(p) for m in modules if isinstance(m, INSIDE) for p in m.parameters()}
    for unit, moments in zip(problem.network.units, curvature.blocks, strict=True):
        if not unit.observed or id(unit.parameters[0]) in summed | inside:
            continue
        expected = problem.truth.moments(unit)
        tolerance = 1e-9 * float(expected.abs().max()) + ZERO
        assert_close(
            moments.dense(),
            expected,
            rtol=0,
            atol=tolerance,
            msg=lambda m, u=unit: f"{u}, {u.block}: {m}",
        )


def assert_every_parameter_moves(problem: Problem) -> None:
    model = problem.model
    for p in model.parameters():
        p.grad = None
    optimizer = KFAC(model, problem.loss, blocks=problem.blocks)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.enable_grad():
            loss = problem.loss(problem.outputs(), problem.y)
            loss.backward()
        return loss

    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="KFAC does not see all uses of .* einsum")
        optimizer.step(closure)
    assert optimizer.report is not None
    assert not optimizer.report.refused
    for name, p in model.named_parameters():
        moved = not torch.equal(p, before[name])
        if name not in trained:
            assert not moved, f"{name} is frozen and moved"
        elif p.grad is not None and float(p.grad.abs().max()) > ZERO:
            assert moved, f"{name} did not move"


def differentiable(spec: Architecture) -> bool:
    """Whether torch itself can: it refuses to overwrite what a derivative needs."""
    try:
        spec.build()(spec.inputs()).sum().backward()
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return False
    return True


def check(spec: Architecture, blocks: Blocks, classes: bool) -> None:
    assume(differentiable(spec))
    make = classification if classes else regression
    problem = make(spec.build(), spec.inputs(), blocks=blocks)
    assert_nothing_falls_back_in_silence(spec, problem.network)
    assert_gradient_is_rebuilt(problem)
    with torch.no_grad():
        assert_fisher_products_are_the_fishers(problem)
        assert_blocks_are_their_definitions(problem)
        assert_every_parameter_moves(problem)


each_network = given(
    architectures(),
    st.builds(
        Blocks,
        sharing=st.sampled_from(["expand", "reduce"]),
        dense_limit=st.sampled_from([512, 0, 10]),
        wide_limit=st.sampled_from([4096, 2]),
    ),
    st.booleans(),
)


@each_network
@settings(max_examples=40)
def test_any_small_network(spec, blocks, classes):
    check(spec, blocks, classes)


@pytest.mark.slow
@each_network
@settings(max_examples=600)
def test_many_small_networks(spec, blocks, classes):
    check(spec, blocks, classes)
