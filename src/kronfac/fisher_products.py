"""uᵀFv for a few vectors from their J v alone [MG15 App. C].

F = c E[Jᵀ F_R J], so uᵀFv = c E[(Ju)ᵀ F_R (Jv)]: one forward-mode pass that carries all directions
along, and no backward pass.

Through a perceptron that pass goes by hand (`perceptron.py`). Any other model runs on dual numbers whose
rows are repeated, once a direction. Layers are replaced while it lasts: a layer needs its own product W a
for one of the copies only, and not at all where the closure's pass has left it, and gives every copy the
tangent W ȧ + V ā of its direction V. What lies between the layers is differentiated by torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from kronfac.layers import Layer, Matrices, replaced
from kronfac.minibatch import Batch, Call, draws_masks
from kronfac.objective import Likelihood
from kronfac.perceptron import perceptron


def fisher_gram(
    model: nn.Module,
    layers: Sequence[Layer],
    likelihood: Likelihood,
    rows: Batch,
    case_weight: float,
    directions: Sequence[Matrices],
) -> Tensor:
    """The matrix of v_iᵀ F v_j for all pairs of directions, (k, k), float64, on the device."""
    gram: Tensor | None = None
    for call in rows.calls:
        outputs, Jv = pushforward(model, layers, call, directions)
        FJv = likelihood.fisher_product(outputs, Jv)
        part = (Jv.flatten(1) @ FJv.flatten(1).mT).double()
        gram = part if gram is None else gram.add_(part)
    assert gram is not None
    # Symmetric up to rounding: F_R is applied to one side only.
    return (gram + gram.mT).mul_(case_weight / (2 * rows.cases))


def fisher_product(
    model: nn.Module,
    layers: Sequence[Layer],
    likelihood: Likelihood,
    rows: Batch,
    case_weight: float,
    vector: Matrices,
) -> Matrices:
    """F v = c E[Jᵀ F_R J v]: the forward-mode pass, and a backward pass from F_R J v."""
    total = tuple(torch.zeros_like(V) for V in vector)
    for rows_call in rows.calls:
        # The way there is also the way back.
        call = replace(rows_call, way=perceptron(model, layers, rows_call))
        outputs, Jv = pushforward(model, layers, call, [vector])
        product = _pullback(model, layers, call, likelihood.fisher_product(outputs, Jv[0]))
        for sum_, V in zip(total, product, strict=True):
            sum_.add_(V, alpha=case_weight / rows.cases)
    return total


def _pullback(model: nn.Module, layers: Sequence[Layer], call: Call, v: Tensor) -> Matrices:
    """Jᵀ v in the parameters, summed over the rows."""
    if passed := perceptron(model, layers, call):
        return passed.gradient(v)
    parameters = [p for layer in layers for p in layer.parameters()]
    with torch.enable_grad():
        outputs = call.run(model)
    grads = iter(torch.autograd.grad(outputs, parameters, v))
    return tuple(layer.join([next(grads) for _ in layer.parameters()]) for layer in layers)


@torch.no_grad()
def pushforward(
    model: nn.Module, layers: Sequence[Layer], call: Call, directions: Sequence[Matrices]
) -> tuple[Tensor, Tensor]:
    """f(x, θ) (rows, outputs) and J v for every direction (k, rows, outputs)."""
    if passed := perceptron(model, layers, call):
        return passed.outputs, passed.pushforward(directions)
    if not draws_masks(model):
        return _dual_pass(model, layers, call, directions)
    # Every direction has to see the same masks: one pass each, from the same seed.
    device = directions[0][0].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        seed = int(torch.randint(2**31, ()))
        tangents = []
        for direction in directions:
            torch.manual_seed(seed)
            outputs, Jv = _dual_pass(model, layers, call, [direction])
            tangents.append(Jv)
    return outputs, torch.cat(tangents)


def _dual_pass(
    model: nn.Module, layers: Sequence[Layer], call: Call, directions: Sequence[Matrices]
) -> tuple[Tensor, Tensor]:
    forwards = [
        _dual_forward(layer, [V[i] for V in directions], call) for i, layer in enumerate(layers)
    ]
    with forward_ad.dual_level(), replaced(layers, forwards):
        dual = call.repeated(len(directions)).run(model)
        outputs, tangents = forward_ad.unpack_dual(dual)
    assert tangents is not None
    return outputs[: call.rows], tangents.view(len(directions), call.rows, -1)


def _dual_forward(layer: Layer, V: Sequence[Tensor], call: Call) -> Callable[[Tensor], Tensor]:
    """What stands in for the layer: s and its tangents W ȧ + V ā, for every copy of the rows."""

    def forward(x: Tensor) -> Tensor:
        a, a_dot = forward_ad.unpack_dual(x)
        a = a[: call.rows]
        s = layer.module_forward(a) if call.activations is None else call.activations[layer.name]
        tangents = layer.tangents(a, V)
        if a_dot is not None:
            tangents.flatten(0, 1).addmm_(a_dot, layer.weight_transposed())
        dual: Tensor = forward_ad.make_dual(s.repeat(len(V), 1), tangents.flatten(0, 1))
        return dual

    return forward
