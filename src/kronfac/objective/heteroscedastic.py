"""y_j ~ N(μ_j, v_j) with both mean and variance predicted.

Layout: z = (μ₁, …, μ_d, v₁, …, v_d), (terms, 2d); targets are (terms, d).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kronfac.errors import TargetError
from kronfac.objective.base import Likelihood, unit_columns


class HeteroscedasticGaussian(Likelihood):
    """Independent Gaussians with outputs z = (μ, v): F_R = diag(1/v, 1/(2v²)).

    −log r = ½ Σ_j (log v_j + (y_j − μ_j)²/v_j) up to a constant, which is left out. However the network
    makes v positive (an exponential, softplus), the Fisher in its parameters is the same.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        """Variances below `eps` count as `eps`, as in `torch.nn.GaussianNLLLoss`."""
        super().__init__()
        if not 0 < eps < float("inf"):
            raise ValueError(f"HeteroscedasticGaussian needs a positive eps; got {eps}.")
        self.eps = eps

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = outputs.chunk(2, dim=-1)
        # With the gradient as if it were not clamped, or a variance that has become too small stayed so.
        return mean, variance + (variance.clamp(min=self.eps) - variance).detach()

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self._split(outputs)
        return (variance.log() + (mean - targets).square() / variance).sum() / 2

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        shape = (draws, outputs[0], outputs[1] // 2)
        return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        mean, variance = self._split(outputs)
        return mean + variance.sqrt() * noise

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self._split(outputs)
        residual = (mean - targets) / variance
        return torch.cat((residual, (1 / variance - residual.square()) / 2), dim=-1)

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """(−ε/√v, (1 − ε²)/2v): means of 1e10 would leave no digit of ε."""
        _, variance = self._split(outputs)
        return torch.cat((-noise / variance.sqrt(), (1 - noise.square()) / (2 * variance)), dim=-1)

    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return self._root(outputs).square() * vectors

    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        return unit_columns(self._root(outputs))

    def _root(self, outputs: Tensor) -> Tensor:
        """The square root of the diagonal of F_R."""
        _, variance = self._split(outputs)
        return torch.cat((1 / variance.sqrt(), 1 / (math.sqrt(2) * variance)), dim=-1)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() != 2 or outputs.shape[1] % 2:
            raise TargetError(
                "HeteroscedasticGaussian needs outputs (terms, 2d), d means and then d variances; got "
                f"{tuple(outputs.shape)}. torch.cat((mean, variance), dim=1) makes them."
            )
        expected = (len(outputs), outputs.shape[1] // 2)
        if tuple(targets.shape) != expected:
            raise TargetError(
                f"HeteroscedasticGaussian needs targets of shape {expected}, one for each mean; got "
                f"{tuple(targets.shape)}."
            )

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
