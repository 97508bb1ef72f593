"""Ā and G on the rows S₁: one forward pass, and backward passes from vectors in output space [MG15 §5]."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from kronfac.factors import KroneckerFactors
from kronfac.layers import Layer
from kronfac.likelihoods import Objective
from kronfac.minibatch import Batch, Call
from kronfac.statistics.capture import capture
from kronfac.statistics.fisher import Fisher


def estimate(
    model: nn.Module,
    layers: Sequence[Layer],
    objective: Objective,
    rows: Batch,
    case_weight: float,
    fisher: Fisher,
    generator: torch.Generator,
    neighbours: bool,
) -> KroneckerFactors:
    """E[ā āᵀ] and c E[g gᵀ] over `rows`, with E[ā_i ā_{i+1}ᵀ], E[g_i g_{i+1}ᵀ] where asked for.

    The objective's scale c goes into G, so that A ⊗ G has the objective's units.
    """
    cases = rows.cases
    noise = fisher.noise(
        objective.likelihood,
        torch.Size((cases, rows.outputs)),
        layers[0].parameters()[0],
        generator,
    )
    total: KroneckerFactors | None = None
    start = 0
    for call in rows.calls:
        part = None if noise is None else noise[:, start : start + call.rows]
        moments = _moments(model, layers, objective, call, fisher, part, neighbours)
        total = moments if total is None else total.plus(moments)
        start += call.rows
    assert total is not None
    return total.scaled(A=1 / cases, G=case_weight / (cases * fisher.draws))


def _moments(
    model: nn.Module,
    layers: Sequence[Layer],
    objective: Objective,
    call: Call,
    fisher: Fisher,
    noise: Tensor | None,
    neighbours: bool,
) -> KroneckerFactors:
    """Sums over the rows of one call, and over the vectors."""
    with torch.enable_grad(), capture(layers) as captured:
        raw_outputs = call.run(model)
    outputs = raw_outputs.detach()
    inputs = [_flat(layer.inputs(x)) for layer, x in zip(layers, captured.inputs(), strict=True)]
    A, A_next = _products(inputs, neighbours)
    preactivations = captured.outputs()
    G: tuple[Tensor, ...] = ()
    G_next: tuple[Tensor, ...] = ()
    for v in fisher.vectors(objective.likelihood, outputs, call.targets, noise):
        grads = torch.autograd.grad(raw_outputs, preactivations, v, retain_graph=True)
        g = [_flat(layer.output_grads(x)) for layer, x in zip(layers, grads, strict=True)]
        new, new_next = _products(g, neighbours)
        G = new if not G else tuple(map(torch.add, G, new))
        G_next = new_next if not G_next else tuple(map(torch.add, G_next, new_next))
    return KroneckerFactors(A, G, A_next, G_next)


def _products(
    rows: list[Tensor], neighbours: bool
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Sums of outer products of each layer's vectors with themselves and with the next layer's."""
    own = tuple(x.mT @ x for x in rows)
    following = tuple(x.mT @ y for x, y in pairwise(rows)) if neighbours else ()
    return own, following


def _flat(x: Tensor) -> Tensor:
    """(batch · shared, features)."""
    return x.flatten(0, 1)
