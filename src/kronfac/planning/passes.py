"""Memory of the passes of a step: the closure's, that of the statistics, and J v.

Each is run on a few examples and on twice as many, as a step runs it, and extrapolated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from kronfac.curvature import Curvature, Fisher
from kronfac.curvature.estimate import Sample, estimate
from kronfac.fisher_products import fisher_gram
from kronfac.linearization import linearize
from kronfac.network import Batch, Matrices, Network, Pass, subsets
from kronfac.network.program import ModelCall
from kronfac.planning.live_bytes import LiveBytes, Peak

FEW = 4
"""Examples of the smaller of both runs, if the network can be divided into examples."""

DECAY = 0.95
"""The decay of the moving averages; what is held does not depend on it, if it is neither 0 nor 1."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes at the peak, by the examples that go through at once."""

    closure: Peak
    """The peak of a forward and a backward pass, the gradients included."""
    statistics: Peak
    """The peak of the estimate of the moments, the new moments included."""
    tangents: Peak
    """The peak of J v along all directions."""
    parts: tuple[int, int, int]
    """Examples that go through each at once: micro-batches go one by one."""


@torch.no_grad()
def pass_memory(
    network: Network,
    batch: Batch,
    fisher: Fisher,
    curvature_examples: tuple[Batch, Batch],
    directions: int,
) -> PassMemory:
    """The memory of a step's passes on this mini-batch.

    Args:
        network: with its engine for J v found.
        batch: the mini-batch.
        fisher: of the statistics.
        curvature_examples: S₁ and S₂.
        directions: how many J v are taken along.
    """
    # As after the first step, which compares J v with the gradient.
    network = replace(network, learned=replace(network.learned, compared=True))
    batch = replace(batch, passes=tuple(map(_without_trace, batch.passes)))
    (few,) = subsets(network, batch, [min(FEW, batch.examples)], None)
    (more,) = subsets(network, batch, [min(2 * few.examples, batch.examples)], None)
    old = _estimate(network, fisher, None, few.passes[0])  # what a later step averages with
    vectors = [network.theta() for _ in range(directions)]
    passes: tuple[tuple[Callable[[Pass], object], Batch], ...] = (
        (partial(_gradient, network), batch),
        (partial(_estimate, network, fisher, old), curvature_examples[0]),
        (partial(_gram, network, vectors), curvature_examples[1]),
    )
    closure, statistics, tangents = (
        Peak.of([(part.examples, _course(run, part)) for part in (few.passes[0], more.passes[0])])
        for run, _ in passes
    )
    m, m1, m2 = (max(part.examples for part in examples.passes) for _, examples in passes)
    return PassMemory(closure, statistics, tangents, (m, m1, m2))


def _without_trace(part: Pass) -> Pass:
    """The pass as if the closure had not kept what it met, which counts here."""
    steps = (
        replace(step, trace=None) if isinstance(step, ModelCall) else step for step in part.steps
    )
    return replace(part, steps=tuple(steps))


def _course(run: Callable[[Pass], object], part: Pass) -> Sequence[int]:
    live = LiveBytes()
    with live:
        run(part)
    return live.course


def _gradient(network: Network, part: Pass) -> object:
    """Gradients as the closure makes them, by a graph that is freed on the way."""
    with torch.enable_grad():
        outputs = part.run(network.model)
        # In place of the loss, whose targets may not be divided: as much as a cross-entropy takes.
        ends = [z.flatten(1).log_softmax(dim=1)[:, 0].sum() for z in outputs]
        total = torch.stack(ends).sum()
    return torch.autograd.grad(total, network.parameters, allow_unused=True)


def _estimate(network: Network, fisher: Fisher, old: Curvature | None, part: Pass) -> Curvature:
    device = "cpu" if network.device.type == "meta" else network.device
    generator = torch.Generator(device=device).manual_seed(0)
    sample = Sample([part], partial(linearize, network), nothing=network.unused)
    blocks = [unit.block for unit in network.units]
    return estimate(sample, blocks, fisher, generator, old=old, decay=DECAY)


def _gram(network: Network, vectors: list[Matrices], part: Pass) -> object:
    return fisher_gram(network, Batch((part,)), vectors)
