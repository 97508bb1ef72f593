"""The average of the iterates, kept beside them [MG15 §13].

    θ̄_t = ξ_t θ̄_{t−1} + (1 − ξ_t) θ_t,    ξ_t = min(1 − 1/t, ξ)

as in `training/averaging.py`, over the parameters that steps start from: those have been validated, so that
a rejected step leaves no trace. The parameters before the first step are left out.
"""

from dataclasses import dataclass, replace

import torch

from kronfac.ranges import Count
from kronfac.vector import Matrices


@dataclass(frozen=True)
class IterateAverage:
    """θ̄, and θ while the model has θ̄ in its place."""

    mean: Matrices | None = None
    """None before the first iterate."""
    count: Count = 0
    """Iterates in it, t."""
    aside: Matrices | None = None
    """θ, which training goes on from, while the model is evaluated at θ̄."""

    def updated(self, theta: Matrices, decay: float) -> "IterateAverage":
        """The average with one more iterate in it."""
        return replace(self, mean=self.joined_by(theta, decay), count=self.count + 1)

    def joined_by(self, theta: Matrices, decay: float) -> Matrices:
        """θ̄_{t+1} with θ as the next iterate."""
        if self.mean is None:
            return theta
        weight = max(1 / (self.count + 1), 1 - decay)
        pairs = zip(self.mean, theta, strict=True)
        return tuple(torch.lerp(old, new, weight) for old, new in pairs)
