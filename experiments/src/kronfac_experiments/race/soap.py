"""SOAP: Adam in the eigenbasis of Shampoo's two factors, for matrices and convolutions.

A weight is taken as a matrix W (out, rest): a convolution's further axes are one. What is no matrix, and a
side that is longer than `LONGEST_SIDE`, keeps its own basis, in which this is Adam.

Reference: Vyas et al., SOAP: improving and stabilizing Shampoo using Adam, 2024.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

BETAS = (0.95, 0.95)
"""Decays of the moments, β₂ that of the factors too: the paper's defaults."""
EVERY = 10
"""Steps between two updates of the eigenbases, the paper's default."""
EPSILON = 1e-8
LONGEST_SIDE = 1024
"""A longer basis costs a CPU more seconds than it saves steps."""


class SOAP(torch.optim.Optimizer):
    """W ← (1 − ε η) W − ε Q_L (m̂ / (√v̂ + 1e-8)) Q_Rᵀ, with Adam's moments of G' = Q_Lᵀ G Q_R.

    L ← β₂ L + (1 − β₂) G Gᵀ and R ← β₂ R + (1 − β₂) Gᵀ G have the eigenvectors Q_L and Q_R, found by one
    step of power iteration and QR every `EVERY` steps. Moment m is kept in the parameter's own basis. The
    first gradient only starts the factors, as there is no basis yet.

    Args:
        params: Parameters.
        lr: ε.
        weight_decay: η, decoupled.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        returned = None
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, group["lr"], group["weight_decay"])
        return returned

    def _move(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        gradient = parameter.grad
        assert gradient is not None
        G = _matrix(gradient)
        state = self.state[parameter]
        if not state:
            state |= {
                "steps": 0,
                "m": torch.zeros_like(G),
                "v": torch.zeros_like(G),
                "factors": _factors(G),
            }
            state["bases"] = [None if f is None else _eigenvectors(f) for f in state["factors"]]
            return
        state["steps"] += 1
        beta1, beta2 = BETAS
        rotated = _rotate(G, state["bases"])
        state["m"].lerp_(G, 1 - beta1)
        state["v"].lerp_(rotated.square(), 1 - beta2)
        m_hat = _rotate(state["m"], state["bases"]) / (1 - beta1 ** state["steps"])
        v_hat = state["v"] / (1 - beta2 ** state["steps"])
        direction = _rotate(m_hat / (v_hat.sqrt() + EPSILON), state["bases"], back=True)
        parameter.mul_(1 - lr * weight_decay)
        parameter.add_(direction.reshape(parameter.shape), alpha=-lr)
        for old, new in zip(state["factors"], _factors(G), strict=True):
            if old is not None:
                old.lerp_(new, 1 - beta2)
        if state["steps"] % EVERY == 0:
            _renew(state)


def _matrix(tensor: Tensor) -> Tensor:
    """The tensor as (out, rest); a vector as (1, length)."""
    return tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(1)


def _factors(G: Tensor) -> list[Tensor | None]:
    """G Gᵀ and Gᵀ G; None for a side that keeps its basis."""
    rows, columns = G.shape
    if rows == 1:
        return [None, None]
    return [
        G @ G.T if rows <= LONGEST_SIDE else None,
        G.T @ G if columns <= LONGEST_SIDE else None,
    ]


def _eigenvectors(factor: Tensor) -> Tensor:
    """Its eigenvectors, in float64: a factor of one gradient is singular, on which float32 may fail."""
    vectors: Tensor = torch.linalg.eigh(factor.double())[1]
    return vectors.to(factor.dtype)


def _rotate(G: Tensor, bases: list[Tensor | None], back: bool = False) -> Tensor:
    """Q_Lᵀ G Q_R, or the way back, Q_L G Q_Rᵀ."""
    left, right = bases
    if left is not None:
        G = (left if back else left.T) @ G
    if right is not None:
        G = G @ (right.T if back else right)
    return G


def _renew(state: dict[str, Any]) -> None:
    """One power iteration and QR for each basis; v follows the order of the eigenvalues."""
    for side, (factor, basis) in enumerate(zip(state["factors"], state["bases"], strict=True)):
        if factor is None:
            continue
        order = (basis * (factor @ basis)).sum(dim=0).argsort(descending=True)
        state["v"] = state["v"].index_select(side, order)
        state["bases"][side] = torch.linalg.qr(factor @ basis[:, order])[0]
