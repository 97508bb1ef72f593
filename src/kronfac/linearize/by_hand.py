"""By hand: multi-layer perceptrons, which consist of linear layers and elementwise functions only.

J and Jᵀ are then products of the weights with the slopes φ′(s) of these functions:

    forwards    ṡ_i = V_i ā_{i−1} + W_i ȧ_{i−1},   ȧ_i = φ′(s_i) ⊙ ṡ_i
    backwards   g_i = φ′(s_i) ⊙ (W_{i+1}ᵀ g_{i+1})

This needs no graph and no dual numbers, whose overhead is a large part of a small network's step. All
passes over the same examples share activations and slopes: for statistics, Fisher products and, if the
closure is K-FAC's own, the gradient. The model itself is not called.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
)

from kronfac.curvature import Tap
from kronfac.linalg import OuterProduct, take
from kronfac.linearize.elementwise import ELEMENTWISE, Applied, Slope, apply, slopes
from kronfac.model import Matrices, Network, RandomState, Unit, hooked, replay, without_hooks
from kronfac.model.side_effects import mixed
from kronfac.record import Batch, LossCall, MiniBatchClosure, ModelCall, Pass, Ref


@dataclass(frozen=True)
class Trace:
    """Inputs and slopes of every layer of a perceptron, for some examples."""

    units: Sequence[Unit]
    inputs: list[Tensor]
    """ā_{i−1} of every layer, (examples, columns of V): with a column of ones if there is a bias."""
    slopes: list[Slope | None]
    """φ′(s_i) after every layer; None without a function."""
    outputs: Tensor
    random: bool = False
    """Whether dropout has drawn masks, which are in the slopes."""

    def pushforward(self, directions: Sequence[Matrices]) -> Tensor:
        """J v for every direction, (k, examples, outputs)."""
        tangents: Tensor | None = None
        layers = zip(
            self.units, self.inputs, self.slopes, zip(*directions, strict=True), strict=True
        )
        for unit, a, slope, matrices in layers:
            own = a.new_empty(len(matrices), len(a), unit.rows)
            for product, V in zip(own, matrices, strict=True):
                torch.mm(a, V.mT, out=product)
            if tangents is not None:
                own.flatten(0, 1).addmm_(tangents.flatten(0, 1), _weight(unit).mT)
            tangents = own if slope is None else slope.times_(own)
        assert tangents is not None
        return tangents

    def backwards(self, v: Tensor) -> Iterator[tuple[Unit, Tensor, Tensor]]:
        """Every layer with its ā_{i−1} and g_i, from last to first; one g is in memory at a time."""
        g = v
        for i, unit in reversed([*enumerate(self.units)]):
            slope = self.slopes[i]
            if slope is not None:
                # v belongs to the caller.
                g = slope.times(g) if g is v else slope.times_(g)
            yield unit, self.inputs[i], g
            if i > 0:
                g = g @ _weight(unit)

    def select(self, index: Tensor | slice) -> "Trace":
        """The trace of some of the examples: views for a slice."""
        return replace(
            self,
            inputs=[take(a, index) for a in self.inputs],
            slopes=[slope and slope.select(index) for slope in self.slopes],
            outputs=take(self.outputs, index),
        )


def _weight(unit: Unit) -> Tensor:
    return unit.parameters[0].detach()


class ByHand:
    """The `Linearization` of a perceptron, with one call and one loss."""

    def __init__(self, part: Pass, trace: Trace) -> None:
        self.part, self.trace = part, trace
        (self._terms,) = part.terms

    @property
    def outputs(self) -> Sequence[Tensor]:
        return [self._terms.matrix(self.trace.outputs)]

    @property
    def summed(self) -> bool:
        return False

    def taps(self, vectors: Sequence[Tensor | None]) -> list[list[Tap]]:
        if all(r is None for r in vectors):  # only the inputs are needed
            return [
                [Tap(a.unsqueeze(1), a.new_zeros(len(a), 1, unit.rows))]
                for unit, a in zip(self.trace.units, self.trace.inputs, strict=True)
            ]
        return [
            [Tap(a.unsqueeze(1), g.unsqueeze(1))]
            for _, a, g in self.trace.backwards(self._cotangent(vectors))
        ][::-1]

    def jvp(self, directions: Sequence[Matrices]) -> list[Tensor]:
        return [self._terms.matrix(self.trace.pushforward(directions))]

    def vjp(self, vectors: Sequence[Tensor | None]) -> Matrices:
        backwards = self.trace.backwards(self._cotangent(vectors))
        return tuple(g.mT @ a for _, a, g in backwards)[::-1]

    def _cotangent(self, vectors: Sequence[Tensor | None]) -> Tensor:
        """r shaped like the network's outputs."""
        (r,) = vectors
        assert r is not None
        return r.reshape(self.trace.outputs.shape)


def trace_of(network: Network, part: Pass) -> Trace | None:
    """The trace of a pass; None if the network is no perceptron, or the pass is not a plain call of it."""
    call = _only_call(part)
    if call is None:
        return None
    return call.trace if isinstance(call.trace, Trace) else trace_call(network, call)


def trace_call(network: Network, call: ModelCall) -> Trace | None:
    """The trace of a call of the model; None if the model is not a perceptron."""
    way = _way(network, call)
    if way is None:
        return None
    units = network.units
    inputs, behind, outputs = way.forwards([unit.parameters for unit in units], call.random)
    ones = outputs.new_ones(len(outputs), 1)
    augmented = [
        torch.cat([a, ones], dim=1) if len(unit.parameters) > 1 else a
        for unit, a in zip(units, inputs, strict=True)
    ]
    return Trace(units, augmented, slopes(behind), outputs, way.random)


def outputs_at(network: Network, part: Pass, delta: Matrices) -> Tensor | None:
    """The outputs at θ + δ without a write to the parameters; None if the model is not a perceptron."""
    call = _only_call(part)
    way = None if call is None else _way(network, call)
    if call is None or way is None:
        return None
    layers = (
        [p.detach() + own for p, own in zip(unit.parameters, unit.split(V), strict=True)]
        for unit, V in zip(network.units, delta, strict=True)
    )
    return way.forwards(layers, call.random)[-1]


def _only_call(part: Pass) -> ModelCall | None:
    """The call of a pass with one call, whose output is the input of the one loss; else None."""
    call = part.steps[0]
    if len(part.steps) != 1 or len(part.losses) != 1 or not isinstance(call, ModelCall):
        return None
    if call.path or call.losses or part.losses[0].input != call.outputs[0]:
        return None
    return None if part.terms[0].channels and len(part.terms[0].shape) > 2 else call


@dataclass(frozen=True)
class _Way:
    """The layers and functions of a call of a perceptron, in order."""

    x: Tensor
    front: list[nn.Module]
    """The functions before the first layer, which are not part of J."""
    segments: list[list[nn.Module]]
    """The functions after every layer."""

    def forwards(
        self, layers: Iterable[Sequence[Tensor]], random: RandomState | None
    ) -> tuple[list[Tensor], list[Applied], Tensor]:
        """Every layer's inputs a_{i−1}, what comes after it, and the outputs, for layers (weight, bias)."""
        inputs: list[Tensor] = []
        behind: list[Applied] = []
        with torch.no_grad(), replay(random):
            a = self.x
            for function in self.front:
                a = function(a)
            for parameters, functions in zip(layers, self.segments, strict=True):
                inputs.append(a)
                a, met = apply(functions, functional.linear(a, *parameters))
                behind.append(met)
        return inputs, behind, a

    @property
    def random(self) -> bool:
        """Whether a dropout draws masks."""
        return any(
            isinstance(function, _DropoutNd) and function.training and function.p > 0
            for functions in (self.front, *self.segments)
            for function in functions
        )


def _way(network: Network, call: ModelCall) -> _Way | None:
    """The layers and functions of a call; None if the model is not a perceptron, or the call not plain."""
    modules = _modules(network.model)
    if modules is None or len(call.args) != 1 or call.kwargs:
        return None
    layers: list[list[int]] = []
    segments: list[list[nn.Module]] = [[]]
    for module in modules:
        if _elementwise(module):
            segments[-1].append(module)
        else:
            layers.append([*map(id, _parameters(module))])
            segments.append([])
    if layers != [[*map(id, unit.parameters)] for unit in network.units]:
        return None  # layers are frozen, shared, unused or in another order
    x = call.args[0]
    if not isinstance(x, Tensor) or x.dim() != 2 or x.dtype != network.dtype:
        return None
    return _Way(x.detach(), segments[0], segments[1:])


def _parameters(module: nn.Module) -> tuple[nn.Parameter, ...]:
    own = module._parameters
    return tuple(p for p in (own["weight"], own["bias"]) if p is not None)


def _modules(model: nn.Module) -> list[nn.Module] | None:
    """The modules of nested `nn.Sequential`, in order; None if there are other modules."""
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
    return type(module) in ELEMENTWISE


def hooks_on_all_modules() -> bool:
    """Whether there are global hooks on modules, which a pass by hand would not call."""
    return bool(
        _global_forward_hooks
        or _global_forward_pre_hooks
        or _global_backward_hooks
        or _global_backward_pre_hooks
    )


def _plain(module: nn.Module) -> bool:
    """Whether a call only does what its class does: no hooks, nothing in place, no replaced forward."""
    own = module.__dict__  # `nn.Module.__getattr__` is slow for missing names
    return not (
        hooks_on_all_modules()
        or not without_hooks(module)
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
        or own.get("inplace")
    )


# -------------------------------------------------------------------------------- K-FAC's own closure


class PassByHand(NamedTuple):
    """A pass over one mini-batch without a graph."""

    loss: Tensor
    batch: Batch
    """With the trace of the examples, for all further passes."""
    gradient: Matrices
    """The gradient by unit."""
    factors: tuple[OuterProduct, ...] | None
    """The gradient as outer products [MG15 §8], if they are kept."""


@torch.no_grad()
def pass_by_hand(
    closure: MiniBatchClosure, network: Network, keep_factors: bool
) -> PassByHand | None:
    """Compute loss and gradients of one mini-batch without a graph or hooks.

    None if the model is not a perceptron, or if the mini-batch is divided into chunks.
    """
    if not closure.whole or _needs_graph(closure, network):
        return None
    objective, targets = closure.objective, closure.targets
    call = ModelCall(closure.inputs, {}, outputs=(0,))
    random = RandomState.current(network.device)
    trace = trace_call(network, call)
    if trace is None:
        return None
    call = replace(call, trace=trace, random=random if trace.random else None)
    outputs = trace.outputs.detach().requires_grad_()
    terms = objective.read(outputs, targets)
    module = objective.module
    with torch.enable_grad():
        loss = (module.forward if without_hooks(module) else module)(outputs, targets)
    (slope,) = torch.autograd.grad(loss, outputs)
    # First, so that old and new gradients are not in memory together.
    for p in network.parameters:
        p.grad = None
    gradient: list[Tensor] = []
    factors: list[OuterProduct] = []
    for unit, a, g in trace.backwards(slope):
        V = g.mT @ a
        for parameter, grad in zip(unit.parameters, unit.split(V), strict=True):
            parameter.grad = grad.contiguous()  # for those who flatten it by view(-1)
        gradient.append(V)
        if keep_factors:
            factors.append(OuterProduct(g, a))
    loss = loss.detach()
    loss_call = LossCall(0, terms, loss, objective.module, (Ref(0), targets.detach()), {})
    batch = Batch((Pass((call,), (loss_call,)),))
    return PassByHand(loss, batch, tuple(gradient[::-1]), tuple(factors[::-1]) or None)


def _needs_graph(closure: MiniBatchClosure, network: Network) -> bool:
    """Whether something needs torch's own backward pass, such as hooks."""
    return (
        closure.objective.of_pairs
        or mixed(closure.targets.device)
        or hooks_on_all_modules()
        or any(t.requires_grad for t in (*closure.inputs, closure.targets))
        or hooked(network.parameters)
    )
