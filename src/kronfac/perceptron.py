"""Passes by hand through a multi-layer perceptron: layers, elementwise functions, nothing else.

Between two layers there are only functions φ of each number by itself there, so that J and Jᵀ are products
of the weights with the slopes φ′(s):

    forwards    ṡ_i = V_i ā_{i−1} + W_i ȧ_{i−1},   ȧ_i = φ′(s_i) ⊙ ṡ_i
    backwards   g_i = φ′(s_i) ⊙ (W_{i+1}ᵀ g_{i+1})

That takes no graph and no dual numbers, whose administration is a good part of a small network's step, and
all passes over the same rows share slopes and activations: the statistics', the Fisher products' and,
where the closure is K-FAC's own, the gradient's. Other networks go through torch's differentiation.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from kronfac.elementwise import ELEMENTWISE, Applied, Slope, applied, slopes
from kronfac.layers import Layer, Matrices
from kronfac.minibatch import Call, draws_masks


@dataclass(frozen=True)
class Perceptron:
    """What some rows met on their way through it."""

    layers: Sequence[Layer]
    inputs: list[Tensor]
    """a_{i−1} of every layer, (rows, in)."""
    slopes: list[Slope | None]
    """φ′(s_i) behind every layer; None where nothing is."""
    outputs: Tensor

    def pushforward(self, directions: Sequence[Matrices]) -> Tensor:
        """J v for every direction, (k, rows, outputs)."""
        tangents: Tensor | None = None
        for i, (layer, a, slope) in enumerate(
            zip(self.layers, self.inputs, self.slopes, strict=True)
        ):
            own = layer.tangents(a, [V[i] for V in directions])
            if tangents is not None:
                own.flatten(0, 1).addmm_(tangents.flatten(0, 1), layer.weight_transposed())
            tangents = own if slope is None else slope.times_(own)
        assert tangents is not None
        return tangents

    def pullback(self, v: Tensor) -> list[Tensor]:
        """Jᵀ v at every layer's output, g_i (rows, out)."""
        return [g for _, _, g in self.backwards(v)][::-1]

    def gradient(self, v: Tensor) -> Matrices:
        """Jᵀ v in the parameters, summed over the rows."""
        return tuple(layer.gradient(a, g) for layer, a, g in self.backwards(v))[::-1]

    def backwards(self, v: Tensor) -> Iterator[tuple[Layer, Tensor, Tensor]]:
        """Every layer with its a_{i−1} and g_i, from the last to the first, one at a time in memory."""
        g = v
        for i, layer in reversed([*enumerate(self.layers)]):
            slope = self.slopes[i]
            if slope is not None:
                # v is not ours to write to.
                g = slope.times(g) if g is v else slope.times_(g)
            yield layer, self.inputs[i], g
            if i > 0:
                g = g @ layer.weight_transposed().mT

    def first(self, rows: int) -> "Perceptron":
        """Of the first rows: views, no copies."""
        return Perceptron(
            self.layers,
            [a[:rows] for a in self.inputs],
            [slope and slope.first(rows) for slope in self.slopes],
            self.outputs[:rows],
        )


def perceptron(model: nn.Module, layers: Sequence[Layer], call: Call) -> Perceptron | None:
    """The rows' way through the model; None if it is not such a model, or not such a call."""
    if isinstance(call.way, Perceptron):
        return call.way
    modules = _modules(model)
    if modules is None or len(call.args) != 1 or call.kwargs:
        return None
    if [module for module in modules if not _elementwise(module)] != [i.module for i in layers]:
        return None  # a layer that is frozen, used twice or not at all, in another order
    x = call.args[0]
    weight = layers[0].parameters()[0]
    if not isinstance(x, Tensor) or x.dim() != 2 or x.dtype != weight.dtype:
        return None
    front, *segments = _segments(modules)
    inputs: list[Tensor] = []
    behind: list[Applied] = []
    with torch.no_grad():
        a = x.detach()
        for function in front:
            a = function(a)  # in front of the first layer: no part of J
        for layer, functions in zip(layers, segments, strict=True):
            inputs.append(a)
            a, met = applied(functions, layer.module_forward(a))
            behind.append(met)
    return Perceptron(layers, inputs, slopes(behind), a)


def _segments(modules: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """The functions in front of the first layer, then those behind each."""
    segments: list[list[nn.Module]] = [[]]
    for module in modules:
        if _elementwise(module):
            segments[-1].append(module)
        else:
            segments.append([])
    return segments


def _modules(model: nn.Module) -> list[nn.Module] | None:
    """One after the other, out of their containers; None if anything else is going on."""
    if not _plain(model):
        return None
    if type(model) is not nn.Sequential:
        return [model] if type(model) is nn.Linear or _elementwise(model) else None
    modules: list[nn.Module] = []
    for child in model:
        inner = _modules(child)
        if inner is None:
            return None
        modules += inner
    return modules


def _elementwise(module: nn.Module) -> bool:
    # Dropout that is switched off does nothing.
    return type(module) in ELEMENTWISE or (type(module) is nn.Dropout and not draws_masks(module))


def _plain(module: nn.Module) -> bool:
    """Whether calling it is what its class says: no hooks, nothing in place, no other forward function."""
    hooks = (
        _global_forward_hooks,
        _global_forward_pre_hooks,
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    replaced = "forward" in module.__dict__
    return not (any(hooks) or replaced or getattr(module, "inplace", False))
