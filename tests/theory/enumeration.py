"""The model's joint distribution over x and y as a finite table, so that expectations are sums.

x is uniform over the given inputs, y ~ P(y|x) over the 2^outputs corners that independent Bernoulli
outputs can take. One row of every table is one pair (x, y); `probabilities` are their weights.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac import Bernoulli
from tests.reference.dense import vec
from tests.theory.networks import Network, activities_and_gradients


@dataclass(frozen=True)
class Outcomes:
    """All pairs (x, y)."""

    x: Tensor
    y: Tensor
    probabilities: Tensor
    activities: list[Tensor]
    """ā_0 … ā_{ℓ−1}, (outcomes, in+1)."""
    gradients: list[Tensor]
    """g_1 … g_ℓ, (outcomes, out)."""

    def expectation(self, values: Tensor) -> Tensor:
        """E[values], over the first dimension."""
        return torch.tensordot(self.probabilities, values, dims=1)

    @property
    def D_theta(self) -> Tensor:
        """Dθ of each outcome, (outcomes, parameters): vec(g_i ā_{i−1}ᵀ) of all layers."""
        layers = []
        for a, g in zip(self.activities, self.gradients, strict=True):
            layers.append(torch.func.vmap(vec)(g[:, :, None] * a[:, None, :]))
        return torch.cat(layers, dim=1)


def enumerate_outcomes(network: Network, x: Tensor) -> Outcomes:
    """Every x with every y, weighed by P(y|x) / cases."""
    outputs = network(x).detach()
    corners = torch.tensor(list(itertools.product([0.0, 1.0], repeat=outputs.shape[1])))
    corners = corners.to(x.dtype)
    all_x = x.repeat_interleave(len(corners), dim=0)
    all_y = corners.repeat(len(x), 1)
    p = network(all_x).detach().sigmoid()
    probabilities = (p * all_y + (1 - p) * (1 - all_y)).prod(dim=1) / len(x)
    activities, gradients = activities_and_gradients(network, Bernoulli(), all_x, all_y)
    return Outcomes(all_x, all_y, probabilities, [a.detach() for a in activities], gradients)
