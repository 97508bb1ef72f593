"""Muon and SOAP in float32, written here so that nobody is held back by an implementation.

`torch.optim.Muon` refuses convolutions and iterates in bfloat16, for which a CPU need not have a fast
product: a step on the MNIST autoencoder took three times as long as in float32. PyTorch has no SOAP.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kronfac_experiments.baseline import PerParameter

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Coefficients of Jordan (2024), chosen for the steepest slope at 0: they bring singular values to
between 0.7 and 1.2 in five steps, not to 1."""
NEWTON_SCHULZ_STEPS = 5
ADAMW_RMS = 0.2
"""Moonshot's scale (Liu et al. 2025): updates have the root mean square of AdamW's, so that matrices and
the rest share a learning rate."""
BASIS_EVERY = 10
"""Steps between two updates of SOAP's eigenbases, the paper's default."""
EPSILON = 1e-8
LONGEST_SIDE = 1024
"""A longer basis costs a CPU more seconds than it saves steps."""


def orthogonalised(G: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
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


class Muon(PerParameter):
    """B ← μ B + g,  W ← (1 − ε η) W − ε 0.2 √max(out, in) · orthogonalised(g + μ B).

    `torch.optim.AdamW` takes the other parameters, at the same learning rate.

    Args:
        params: All parameters.
        matrices: Those that are orthogonalised, with two or more axes; a convolution as (out, rest).
        lr: ε.
        weight_decay: η, decoupled.
        momentum: μ.
        beta2: Of AdamW.

    References: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; Liu et al.,
    Muon is scalable for LLM training, 2025.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        matrices: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        beta2: float = 0.999,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(matrices, defaults)
        taken = {id(p) for group in self.param_groups for p in group["params"]}
        rest = [p for p in params if id(p) not in taken]
        self._rest = torch.optim.AdamW(
            rest, lr=lr, betas=(0.9, beta2), weight_decay=weight_decay, fused=True
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of matrices and of the rest."""
        super().zero_grad(set_to_none)
        self._rest.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of both parts; to measure, not to load."""
        return {"matrices": super().state_dict(), "rest": self._rest.state_dict()}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
        returned = super().step(closure)
        for group in self._rest.param_groups:
            group["lr"] = self.param_groups[0]["lr"]  # a schedule sets this one
        self._rest.step()
        return returned

    def move(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Move a matrix or a convolution."""
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        buffer = state["momentum"].mul_(group["momentum"]).add_(gradient)
        matrix = gradient.add(buffer, alpha=group["momentum"]).flatten(1)
        direction = orthogonalised(matrix).reshape(parameter.shape)
        scale = ADAMW_RMS * max(matrix.shape) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction, alpha=-group["lr"] * scale)


class SOAP(PerParameter):
    """Adam in the eigenbasis of Shampoo's two factors, for matrices and convolutions.

    W ← (1 − ε η) W − ε Q_L (m̂ / (√v̂ + 1e-8)) Q_Rᵀ, with Adam's moments of G' = Q_Lᵀ G Q_R.

    L ← β₂ L + (1 − β₂) G Gᵀ and R ← β₂ R + (1 − β₂) Gᵀ G have the eigenvectors Q_L and Q_R, found by one
    step of power iteration and QR every 10 steps. Moment m is kept in the parameter's own basis. The
    first gradient only starts the factors, as there is no basis yet. A convolution is the matrix
    (out, rest). A vector, and a side longer than `LONGEST_SIDE`, keeps its own basis, where this is Adam.

    Args:
        params: Parameters.
        lr: ε.
        weight_decay: η, decoupled.
        betas: Decays of the moments, β₂ of the factors too; those of the paper are 0.95 and 0.95.

    Reference: Vyas et al., SOAP: improving and stabilizing Shampoo using Adam, 2024.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.95, 0.95),
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    def move(
        self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        """Move a parameter of any shape."""
        G = gradient.reshape(1, -1) if gradient.ndim < 2 else gradient.flatten(1)
        if not state:
            state |= {"steps": 0, "m": torch.zeros_like(G), "v": torch.zeros_like(G)}
            state["factors"] = _factors(G)
            state["bases"] = [None if f is None else _eigenvectors(f) for f in state["factors"]]
            return
        state["steps"] += 1
        beta1, beta2 = group["betas"]
        rotated = _rotate(G, state["bases"])
        state["m"].lerp_(G, 1 - beta1)
        state["v"].lerp_(rotated.square(), 1 - beta2)
        m_hat = _rotate(state["m"], state["bases"]) / (1 - beta1 ** state["steps"])
        v_hat = state["v"] / (1 - beta2 ** state["steps"])
        direction = _rotate(m_hat / (v_hat.sqrt() + EPSILON), state["bases"], back=True)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(direction.reshape(parameter.shape), alpha=-group["lr"])
        for old, new in zip(state["factors"], _factors(G), strict=True):
            if old is not None:
                old.lerp_(new, 1 - beta2)
        if state["steps"] % BASIS_EVERY == 0:
            _renew(state)


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
