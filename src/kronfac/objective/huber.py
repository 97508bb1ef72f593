"""Robust least squares: quadratic for small residuals, linear for large ones."""

import copy

import torch
from torch import Tensor
from torch.nn import functional

from kronfac.objective.elementwise import ElementwiseLikelihood, refuse_draw


class Huber(ElementwiseLikelihood):
    """c · Σ_j ρ_δ(z_j − y_j), ρ_δ(r) = r²/2 if |r| ≤ δ, else δ (|r| − δ/2).

    Its curvature is c · diag(min(1, δ/|r_j|)): that of the parabola which touches the loss at r and at −r
    and lies above it everywhere else, as in iteratively reweighted least squares.

    Deviation: it is neither the Fisher nor the Hessian, which is 0 if |r| > δ, so that examples with large
    residuals had a gradient but no curvature. `GaussNewton(torch.nn.HuberLoss())` has the Hessian.
    """

    def __init__(self, delta: float = 1.0, curvature: float = 1.0) -> None:
        """δ = `delta`; c = `curvature`, which is 1/β for `torch.nn.SmoothL1Loss` with δ = β."""
        super().__init__()
        if not (0 < delta < float("inf") and 0 < curvature < float("inf")):
            raise ValueError(
                f"Huber needs a positive delta and curvature; got {delta} and {curvature}."
            )
        self.delta = delta
        self.curvature = curvature
        self._targets: Tensor | None = None

    def given(self, targets: Tensor) -> "Huber":
        result = copy.copy(self)
        result._targets = targets
        return result

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.huber_loss(outputs, targets, delta=self.delta, reduction="sum")
        return self.curvature * loss

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        refuse_draw(self)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.curvature * (outputs - targets).clamp(-self.delta, self.delta)

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        """c min(1, δ/|r|); c, its upper bound, if the targets are not known."""
        if self._targets is None:
            return torch.full_like(outputs, self.curvature)
        size = (outputs - self._targets).abs().clamp(min=self.delta)
        return self.curvature * self.delta / size

    def extra_repr(self) -> str:
        return f"delta={self.delta}, curvature={self.curvature}"
