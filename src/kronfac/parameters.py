"""A model's parameters as one vector: the gradient that a closure left there, the loss elsewhere, moves."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.errors import ClosureError
from kronfac.layers import Layer, Matrices

StaleGradients = Mapping[nn.Parameter, tuple[Tensor, int]]
"""Gradients from before a closure was called, with their versions."""


def gradient(layers: Sequence[Layer], weight_decay: float, stale: StaleGradients) -> Matrices:
    """∇h, the weight decay's ηθ included; of what was there before the closure nothing counts.

    `stale` holds those gradients with their versions, which every write to a tensor counts up.
    """
    gradients = []
    for layer in layers:
        grads = []
        for p in layer.parameters():
            old, version = stale.get(p, (None, 0))
            if p.grad is not None and (p.grad is not old or p.grad._version != version):
                grads.append(p.grad)
        if len(grads) < len(layer.parameters()):
            raise ClosureError(
                f"The closure left no gradient in layer {layer.name!r}: it has to call "
                "backward() on a loss that depends on every trained layer."
            )
        gradients.append(
            _decayed(layer, grads, weight_decay) if weight_decay else layer.join(grads)
        )
    return tuple(gradients)


def _decayed(layer: Layer, grads: Sequence[Tensor], weight_decay: float) -> Tensor:
    """The gradient and ηθ, in one pass over memory."""
    V = grads[0].new_empty(layer.shape)
    for part, grad, p in zip(layer.split(V), grads, layer.parameters(), strict=True):
        torch.add(grad, p, alpha=weight_decay, out=part)
    return V


def forget_gradients(layers: Sequence[Layer]) -> None:
    """So that a closure does not add to what is there.

    The same as `Optimizer.zero_grad`, which tells torch's profiler: a few per cent of a small step.
    """
    for layer in layers:
        for parameter in layer.parameters():
            parameter.grad = None


def loss_at(closure: Callable[[], Any], layers: Sequence[Layer], delta: Matrices) -> Tensor:
    """What the closure returns at θ + δ; θ and its gradients are put back as they were."""
    parameters = [p for layer in layers for p in layer.parameters()]
    kept = [(p.clone(), p.grad) for p in parameters]
    try:
        for p in parameters:
            p.grad = None
        move(layers, delta)
        with torch.enable_grad():
            returned = closure()
        return as_loss(returned, delta[0].device)
    finally:
        for p, (value, grad) in zip(parameters, kept, strict=True):
            p.copy_(value)
            p.grad = grad


def move(layers: Sequence[Layer], delta: Matrices) -> None:
    """θ ← θ + δ."""
    for layer, V in zip(layers, delta, strict=True):
        for parameter, part in zip(layer.parameters(), layer.split(V), strict=True):
            parameter.add_(part)


def place(layers: Sequence[Layer], theta: Matrices) -> None:
    """θ as given."""
    for layer, V in zip(layers, theta, strict=True):
        for parameter, part in zip(layer.parameters(), layer.split(V), strict=True):
            parameter.copy_(part)


def as_loss(returned: Any, device: torch.device) -> Tensor:
    """What the closure returned as a tensor without dimensions; a Python number is float64."""
    dtype = torch.float64 if isinstance(returned, float) else None
    try:
        return torch.as_tensor(returned, dtype=dtype, device=device).detach().reshape(())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ClosureError(
            f"The closure has to return the loss, one number; got {returned!r}."
        ) from error
