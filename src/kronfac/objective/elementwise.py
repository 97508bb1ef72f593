"""Outputs that do not meet in the loss: F_R is diagonal."""

from abc import abstractmethod
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor

from kronfac.objective.base import Likelihood, unit_columns


class ElementwiseLikelihood(Likelihood):
    """Independent outputs: F_R = diag(f(z)) with f from `fisher_diagonal`."""

    @abstractmethod
    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        """f, (terms, event), at least 0."""

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        """Uniform numbers in [0, 1), one for each output."""
        return torch.rand(
            (draws, *outputs), dtype=like.dtype, device=like.device, generator=generator
        )

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """±√f with a random sign.

        Its second moment is F_R, as that of the score at a drawn target, and the square of each element is
        f itself and not f on average.
        """
        return self.fisher_diagonal(outputs).sqrt() * signs(noise)

    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return self.fisher_diagonal(outputs) * vectors

    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        return unit_columns(self.fisher_diagonal(outputs).sqrt())


def signs(noise: Tensor) -> Tensor:
    """−1 or 1, equally probable, from uniform numbers."""
    return torch.where(noise < 0.5, -1.0, 1.0).to(noise.dtype)


def refuse_draw(likelihood: Likelihood) -> NoReturn:
    """Raise a TypeError: a curvature that is no Fisher was asked for a target of its distribution."""
    raise TypeError(
        f"{type(likelihood).__name__} is a loss and not a distribution: it has no targets to draw."
    )
