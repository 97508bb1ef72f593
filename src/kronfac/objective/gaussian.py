"""y ~ N(z, σ² I): least squares."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from kronfac.objective.base import Likelihood, unit_columns


class Gaussian(Likelihood):
    """N(z, σ² I): −log r = ‖y − z‖² / 2σ² up to a constant, which is left out; F_R = I / σ²."""

    def __init__(self, variance: float = 1.0) -> None:
        """σ² = `variance`; the default makes the loss ½ ‖y − z‖²."""
        super().__init__()
        if not 0 < variance < float("inf"):
            raise ValueError(f"Gaussian needs a positive variance; got {variance}.")
        self.variance = variance

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum() / (2 * self.variance)

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        return torch.randn(
            (draws, *outputs), dtype=like.dtype, device=like.device, generator=generator
        )

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs + noise * math.sqrt(self.variance)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) / self.variance

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """(z − (z + σε)) / σ² = −ε/σ: outputs of 1e10 would leave no digit of ε, and a Fisher of 0."""
        return noise / -math.sqrt(self.variance)

    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return vectors / self.variance

    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        return unit_columns(torch.full_like(outputs, 1 / math.sqrt(self.variance)))

    def extra_repr(self) -> str:
        return f"variance={self.variance}"


class Residual(Gaussian):
    """The same for outputs that are residuals, with targets drawn as z ± σ, each output by itself.

    E[r rᵀ] = F_R as for normal draws. If a term is a single number, r² = 1/σ² whatever is drawn: the
    sampled Fisher is the exact one, at the same cost.
    """

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        signs = torch.randint(2, (draws, *outputs), device=like.device, generator=generator)
        return (2 * signs - 1).to(like.dtype)
