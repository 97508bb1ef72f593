"""y_j ~ Bernoulli(σ(z_j)), independent: logistic outputs with cross-entropy."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kronfac.objective.base import Likelihood, unit_columns


class Bernoulli(Likelihood):
    """Independent Bernoulli outputs with logits z: F_R = diag(p (1 − p)), p = σ(z).

    Targets may be anything in [0, 1], as the grey levels of an image are.
    """

    saturates: ClassVar[bool] = True

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        return torch.rand(
            (draws, *outputs), dtype=like.dtype, device=like.device, generator=generator
        )

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return (noise < outputs.sigmoid()).to(outputs.dtype)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sigmoid() - targets

    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        p = outputs.sigmoid()
        return p * (1 - p) * vectors

    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        p = outputs.sigmoid()
        return unit_columns((p * (1 - p)).sqrt())
