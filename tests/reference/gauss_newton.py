"""δᵀFδ of any model under any loss, by its definition: dense, float64, torch only.

For the losses of natural parameters (least squares, logistic, softmax) the Fisher of the objective is

    F = Jᵀ (∂²loss/∂z²) J,

z being what the loss was called with and J its Jacobian in all trained parameters, whatever the number of
their uses. Reductions, class weights, `ignore_index` and soft targets are in the loss's own Hessian.
Nothing here imports kronfac.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

Vector = dict[str, Tensor]
"""One tensor for each parameter, by its name."""


def parameters(model: nn.Module) -> Vector:
    """A copy of every trained parameter."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def inner(u: Mapping[str, Tensor], v: Mapping[str, Tensor]) -> float:
    """uᵀv."""
    return float(sum((u[name] * v[name]).sum() for name in u))


def gradient(model: nn.Module, objective: Callable[[nn.Module], Tensor]) -> Vector:
    """∇ of `objective(model)`, by autograd."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    grads = torch.autograd.grad(objective(model), list(named.values()))
    return dict(zip(named, grads, strict=True))


def curvature(
    model: nn.Module,
    theta: Vector,
    logits: Callable[[Callable[..., Tensor]], Tensor],
    loss: Callable[[Tensor], Tensor],
    delta: Vector,
) -> float:
    """δᵀFδ at θ.

    Args:
        model: what is trained; its own parameters do not matter.
        theta: θ.
        logits: z from a function that stands for the model, as in `lambda f: f(x).reshape(-1, C)`.
        loss: the loss as a function of z alone.
        delta: δ.
    """

    def outputs(values: Vector) -> Tensor:
        return logits(lambda *args: functional_call(model, values, args))

    z = outputs(theta)
    J = jacrev(outputs)(theta)
    Jv = sum((J[name].flatten(z.dim()) @ delta[name].flatten()) for name in delta)
    assert isinstance(Jv, Tensor)
    H = hessian(loss)(z).reshape(z.numel(), z.numel())
    return float(Jv.flatten() @ H @ Jv.flatten())
