"""Ā and G on the rows S₁: one forward pass, and backward passes from vectors in output space [MG15 §5]."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from kronfac.factors import KroneckerFactors, MovingAverage
from kronfac.layers import Layer, replaced
from kronfac.minibatch import Batch, Call
from kronfac.objective import Objective
from kronfac.perceptron import perceptron
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
    previous: KroneckerFactors | None = None,
    decay: float = 0.0,
) -> KroneckerFactors:
    """E[ā āᵀ] and c E[g gᵀ] over `rows`, averaged into `previous` with weight 1 − decay.

    The objective's scale c goes into G, so that A ⊗ G has the objective's units. With neighbours,
    also E[ā_i ā_{i+1}ᵀ] and c E[g_i g_{i+1}ᵀ].
    """
    cases = rows.cases
    noise = fisher.noise(
        objective.likelihood,
        torch.Size((cases, rows.outputs)),
        layers[0].parameters()[0],
        generator,
    )
    average = MovingAverage(previous, decay, neighbours)
    start = 0
    for call in rows.calls:
        part = None if noise is None else noise[:, start : start + call.rows]
        passed = perceptron(model, layers, call) or _traced(model, layers, call)
        average.add(
            "A",
            [_flat(i.inputs(x)) for i, x in zip(layers, passed.inputs, strict=True)],
            1 / cases,
        )
        for v in fisher.vectors(objective.likelihood, passed.outputs, call.targets, part):
            average.add(
                "G",
                [_flat(i.output_grads(g)) for i, g in zip(layers, passed.pullback(v), strict=True)],
                case_weight / (cases * fisher.draws),
            )
        start += call.rows
    return average.value(cases)


@dataclass(frozen=True)
class _Traced:
    """The rows' way through any model, as torch's graph has it."""

    inputs: list[Tensor]
    outputs: Tensor
    """Without the graph."""
    ends: Tensor
    """The same, with it."""
    preactivations: list[GradientEdge]

    def pullback(self, v: Tensor) -> Sequence[Tensor]:
        """Jᵀ v at every layer's output; not at the weights, whose products autograd then leaves out."""
        return torch.autograd.grad(self.ends, self.preactivations, v, retain_graph=True)


def _traced(model: nn.Module, layers: Sequence[Layer], call: Call) -> _Traced:
    with torch.enable_grad(), capture(layers) as captured, _reusing(layers, call):
        outputs = call.run(model)
    return _Traced(captured.inputs(), outputs.detach(), outputs, captured.outputs())


def _reusing(layers: Sequence[Layer], call: Call) -> AbstractContextManager[None]:
    """Layers that return what they returned in the closure's pass, where that was kept."""
    if call.activations is None:
        return nullcontext()
    return replaced(
        layers, [partial(layer.known_output, s=call.activations[layer.name]) for layer in layers]
    )


def _flat(x: Tensor) -> Tensor:
    """(batch · shared, features)."""
    return x.flatten(0, 1)
