"""Muon in float32: momentum on matrices made orthogonal, AdamW for everything else.

`torch.optim.Muon` runs its Newton–Schulz iteration in bfloat16, for which a CPU need not have a fast
product: a step on the MNIST autoencoder's matrices took 1.6 s, and 0.5 s in float32, on the machine of
`docs/results`. The iteration here is the same one in float32.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kronfac_experiments.baseline import evaluate

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan (2024), chosen for the steepest slope at 0: they bring singular values to
between 0.7 and 1.2 in five steps, not to 1."""
STEPS = 5
MOMENTUM = 0.95
ADAMW_RMS = 0.2
"""Moonshot's scale (Liu et al. 2025): updates have the root mean square of AdamW's, so that matrices and
the rest share a learning rate."""


def orthogonalised(G: Tensor, steps: int = STEPS) -> Tensor:
    """U S' Vᵀ for G = U S Vᵀ, with S' near 1: X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X from G / ‖G‖."""
    a, b, c = QUINTIC
    wide = G.shape[0] <= G.shape[1]
    X = G if wide else G.T  # the smaller Gram matrix
    X = X / X.norm().clamp_min(1e-7)
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    result: Tensor = X if wide else X.T
    return result


class Muon(torch.optim.Optimizer):
    """B ← μ B + g,  W ← (1 − ε η) W − ε 0.2 √max(out, in) · orthogonalised(g + μ B).

    Every parameter with two axes is taken for a matrix, the first and last layers' too, if `matrices` does
    not say otherwise; the rest goes to `torch.optim.AdamW` with the same learning rate.

    Args:
        params: Parameters.
        lr: ε.
        weight_decay: η, decoupled.
        matrices: Those that are taken for matrices, with two or more axes; a convolution as (out, rest).

    References: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; Liu et al.,
    Muon is scalable for LLM training, 2025.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        matrices: Iterable[nn.Parameter] | None = None,
    ) -> None:
        parameters = list(params)
        chosen = [p for p in parameters if p.ndim == 2] if matrices is None else list(matrices)
        defaults = {"lr": lr, "momentum": MOMENTUM, "weight_decay": weight_decay}
        super().__init__(chosen, defaults)
        taken = set(map(id, chosen))
        rest = [p for p in parameters if id(p) not in taken]
        self._rest = torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay) if rest else None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of matrices and of the rest."""
        super().zero_grad(set_to_none)
        if self._rest is not None:
            self._rest.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        returned = evaluate(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["momentum"], group["weight_decay"])
        if self._rest is not None:
            for group in self._rest.param_groups:
                group["lr"] = self.param_groups[0]["lr"]  # a schedule sets this one
            self._rest.step()
        return returned

    def _move(self, parameter: Tensor, lr: float, momentum: float, weight_decay: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer = state["momentum"].mul_(momentum).add_(gradient)
        matrix = gradient.add(buffer, alpha=momentum).flatten(1)
        direction = orthogonalised(matrix).reshape(parameter.shape)
        scale = ADAMW_RMS * max(matrix.shape) ** 0.5
        parameter.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr * scale)
