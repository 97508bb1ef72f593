"""The paper's pseudocode with every matrix written out [MG15 §9]: dense, float64, torch only.

The truth for a whole run of `KFAC`: nothing here imports kronfac, and no matrix is smaller than it is
in the paper. The curvature of the objective in output space is taken from the loss itself: for the
losses here the Hessian with respect to the outputs is the Fisher of the predictive distribution, in
the units of the loss. So no table of scales is repeated from `kronfac.objective`.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import hessian, jacrev

from tests.reference import dense


@dataclass(frozen=True)
class Numbers:
    """What one step found, named as in `kronfac.StepReport`."""

    alpha: float
    mu: float | None
    lambda_: float
    gamma: float
    rho: float | None
    predicted_change: float
    objective: float
    """h(θ) before the step, weight decay included."""


@dataclass
class Pseudocode:
    """K-FAC on a copy of `model`, whose parameters `step` moves."""

    model: nn.Module
    loss: nn.Module
    tridiagonal: bool = False
    eta: float = 0.0
    lambda_: float = 1.0
    T1: int | None = 5
    """None leaves λ as it is."""
    T2: int | None = 20
    """None leaves γ as it is."""
    T3: int = 20
    tau1: float = 1.0
    tau2: float = 1.0
    gamma: float | None = None
    """The first γ; None for √(λ + η)."""
    gamma_min: float = 0.0
    gamma_max: float = math.inf
    tied: bool = False
    """γ = √(λ + η) at each refresh."""
    exact_tikhonov: bool = False
    momentum: bool = True
    raw_alpha: float | None = None
    """α of an update that is not re-scaled."""
    penalty: Callable[[Tensor], Tensor] | None = None
    """A penalty on θ, part of what the closure returns."""

    def __post_init__(self) -> None:
        self.model = copy.deepcopy(self.model)
        self.k = 0
        self.gamma = self.gamma or math.sqrt(self.lambda_ + self.eta)
        self.A: dense.Blocks | None = None
        self.G: dense.Blocks | None = None
        self.inverse: Tensor | None = None  # F⁰⁻¹, damped, as of the last refresh
        self.delta_0: Tensor | None = None

    # ------------------------------------------------------------------------------- the objective

    def closure_loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = self.loss(dense.network_function(self.model, theta, x), y)
        return loss if self.penalty is None else loss + self.penalty(theta)

    def objective(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """h(θ) = loss + η/2 ‖θ‖²."""
        return self.closure_loss(theta, x, y) + self.eta / 2 * theta @ theta

    # ---------------------------------------------------------------------------------- statistics

    def update_statistics(self, x: Tensor, K: Tensor) -> None:
        """Ā and G on S₁ with decay ε = min(1 − 1/k, 0.95); K is E[∇_z log r ∇_z log rᵀ] [§5]."""
        A, G = moments(self.model, x, K)
        eps = min(1 - 1 / self.k, 0.95)
        self.A = A if self.A is None else _average(self.A, A, eps)
        self.G = G if self.G is None else _average(self.G, G, eps)

    def fresh_inverse(self, gamma: float) -> Tensor:
        """(F̆ or F̂, damped with γ)⁻¹ as one matrix [§4.2, §4.3, §6.3]."""
        if self.exact_tikhonov:
            return torch.linalg.inv(dense.exact_tikhonov(self.A, self.G, gamma))
        A, G = dense.factored_tikhonov(self.A, self.G, gamma)
        build = dense.block_tridiagonal_fisher if self.tridiagonal else dense.block_diagonal_fisher
        return torch.linalg.inv(build(A, G))

    # -------------------------------------------------------------------------------------- a step

    def candidates(self) -> list[float]:
        """Γ [§6.6]."""
        if self.tied:
            return [math.sqrt(self.lambda_ + self.eta)] if self.refreshes() else [self.gamma]
        if self.T2 is None or self.k % self.T2:
            return [self.gamma]
        omega = math.sqrt(19 / 20) ** self.T2
        return [
            max(omega * self.gamma, self.gamma_min),
            self.gamma,
            min(self.gamma / omega, self.gamma_max),
        ]

    def refreshes(self) -> bool:
        return self.k <= 3 or self.k % self.T3 == 0

    def step(self, x: Tensor, y: Tensor, K: Tensor | None = None) -> Numbers:
        """One iteration on the mini-batch S′.

        Args:
            x: inputs (m, in).
            y: targets.
            K: for S₁, E[∇_z log r ∇_z log rᵀ] in the units of the loss; the expectation over the
                model's own targets if None.
        """
        self.k += 1
        m = len(x)
        S1, S2 = slice(math.ceil(self.tau1 * m)), slice(math.ceil(self.tau2 * m))
        theta = dense.theta(self.model)
        nabla = jacrev(self.objective)(theta, x, y)
        curvature = output_curvature(self.model, self.loss, x, y)
        self.update_statistics(x[S1], curvature[S1] if K is None else K)
        F = fisher(self.model, x[S2], curvature[S2])
        H = F + (self.lambda_ + self.eta) * torch.eye(len(F), dtype=F.dtype)
        h = float(self.objective(theta, x, y))

        best = None
        for gamma in self.candidates():
            inverse = self.fresh_inverse(gamma) if self.refreshes() else self.inverse
            alpha, mu, delta = self.rescaled(H, nabla, -inverse @ nabla)
            change = float(delta @ H @ delta / 2 + nabla @ delta)
            if best is None or change < best[0]:
                best = (change, gamma, inverse, alpha, mu, delta)
        change, self.gamma, self.inverse, alpha, mu, delta = best

        rho = None
        if self.T1 is not None and self.k % self.T1 == 0:
            rho = (float(self.objective(theta + delta, x, y)) - h) / change
            omega = (19 / 20) ** self.T1
            if rho > 3 / 4:
                self.lambda_ *= omega
            elif rho < 1 / 4:
                self.lambda_ /= omega
        self.move(delta)
        self.delta_0 = delta
        return Numbers(alpha, mu, self.lambda_, self.gamma, rho, change, h)

    def rescaled(self, H: Tensor, nabla: Tensor, Delta: Tensor):
        """α, μ and δ = αΔ + μδ₀ [§6.4, §7]."""
        if self.raw_alpha is not None:
            return self.raw_alpha, None, self.raw_alpha * Delta
        if not self.momentum or self.delta_0 is None:
            alpha = float(-nabla @ Delta / (Delta @ H @ Delta))
            return alpha, None, alpha * Delta
        V = torch.stack([Delta, self.delta_0], dim=1)
        alpha, mu = torch.linalg.solve(V.mT @ H @ V, -V.mT @ nabla).tolist()
        return alpha, mu, alpha * Delta + mu * self.delta_0

    @torch.no_grad()
    def move(self, delta: Tensor) -> None:
        """θ ← θ + δ."""
        for layer, V in zip(
            dense.linears(self.model), dense.unflatten(delta, dense.shapes(self.model)), strict=True
        ):
            layer.weight += V[:, : layer.in_features]
            if layer.bias is not None:
                layer.bias += V[:, -1]


def output_curvature(model: nn.Module, loss: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """m ∂²loss/∂z² of every case, (m, outputs, outputs): what averages to the Fisher."""
    z = model(x).detach()
    full = hessian(lambda outputs: loss(outputs, y))(z)  # (m, outputs, m, outputs)
    return len(x) * torch.stack([full[i, :, i, :] for i in range(len(x))])


def moments(model: nn.Module, x: Tensor, K: Tensor) -> tuple[dense.Blocks, dense.Blocks]:
    """Ā and G of all pairs of layers on these cases, from the curvature K of every case's outputs."""
    a, J = dense.layer_inputs(model, x), dense.preactivation_jacobians(model, x)
    A = [[a_i.mT @ a_j / len(x) for a_j in a] for a_i in a]
    G = [[torch.einsum("coi,cop,cpj->ij", J_i, K, J_j) / len(x) for J_j in J] for J_i in J]
    return A, G


def fisher(model: nn.Module, x: Tensor, K: Tensor) -> Tensor:
    """The exact Fisher on these cases: the mean of Jᵀ K J."""
    J = dense.jacobian(model, x)
    return torch.einsum("cop,coq,cqr->pr", J, K, J) / len(J)


def low_rank_is_cheaper(d_out: int, d_in: int, m: int) -> bool:
    """Multiplications of G⁻¹𝒢 (out,out,m), 𝒜A⁻¹ (m,in,in) and their product, against G⁻¹VA⁻¹."""
    apart = d_out * d_out * m + m * d_in * d_in + d_out * m * d_in
    together = d_out * d_out * d_in + d_out * d_in * d_in
    return apart < together


def _average(old: dense.Blocks, new: dense.Blocks, eps: float) -> dense.Blocks:
    return [
        [eps * M + (1 - eps) * N for M, N in zip(M_i, N_i, strict=True)]
        for M_i, N_i in zip(old, new, strict=True)
    ]
