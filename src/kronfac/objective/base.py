"""What K-FAC asks of a predictive distribution R_{y|z} with natural parameters z.

Layout: outputs z are (terms, event). Everything here is per term and unscaled; how terms are weighed in
the objective is the business of `Terms`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from kronfac.errors import TargetError


class Likelihood(nn.Module, ABC):
    """A predictive distribution; called as a loss it is −log r(y|z) averaged over the terms.

    The negative log-probability of a term is summed over its outputs, so that the loss is the paper's
    objective h(θ) = E[−log p(y|x, θ)] and not that divided by the number of outputs.
    """

    saturates: ClassVar[bool] = False
    """Whether the score is a difference of probabilities, which has no digits left if a term is all but
    certain: if −log r is of the size of the dtype's ε."""
    needs_targets: ClassVar[bool] = False
    """Whether its curvature is defined at known targets alone, as that of `GaussNewton` is."""

    @property
    def summed(self) -> bool:
        """Whether it is a sum over the terms if it is called as a loss; else it is a mean."""
        return False

    def given(self, targets: Tensor) -> "Likelihood":
        """The same for terms with these targets: itself, unless its curvature depends on them."""
        return self

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over terms of −log r(y|z)."""
        return likelihood_loss(self, outputs, targets)

    def reduced(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """What a call returns: the mean over terms, or the sum if it is `summed`."""
        return self.negative_log_likelihood(outputs, targets) / len(outputs)

    @abstractmethod
    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Σ over terms of −log r(y|z), up to summands without z."""

    @abstractmethod
    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        """The random numbers for `draws` targets of each term, (draws, terms, …).

        Drawn apart from `sample`, because a generator asked in chunks gives other numbers: they are
        drawn for the terms of all chunks and ranks, or for a fixed part of them
        (`curvature/draws.py`), so that a step depends on neither.
        """

    @abstractmethod
    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Targets y ~ R_{y|z}, a deterministic function of z and one draw of `noise`."""

    @abstractmethod
    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """∂(−log r(y|z))/∂z, (terms, event)."""

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """The score at a target that R_{y|z} itself drew: E[score scoreᵀ] = F_R."""
        return self.score(outputs, self.sample(outputs, noise))

    @abstractmethod
    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """F_R v for each term; `vectors` is (…, terms, event)."""

    @abstractmethod
    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        """Vectors r₁, r₂, … (terms, event) with Σ_j r_j r_jᵀ = F_R."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets that do not fit, before broadcasting can make sense of them."""
        if targets.shape != outputs.shape:
            raise TargetError(
                f"KFAC reads this loss as {type(self).__name__}, which needs targets of the outputs' shape "
                f"{tuple(outputs.shape)}; got {tuple(targets.shape)}. Reshape the targets or the outputs "
                "before the loss, as with targets.view_as(outputs)."
            )


def likelihood_loss(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over terms of −log r(y|z); a function that K-FAC sees the calls of, as of torch's losses."""
    if has_torch_function_variadic(outputs, targets):
        loss: Tensor = handle_torch_function(
            likelihood_loss, (outputs, targets), likelihood, outputs, targets
        )
        return loss
    likelihood.check(outputs, targets)
    return likelihood.reduced(outputs, targets)


def unit_columns(scales: Tensor) -> Iterator[Tensor]:
    """The columns of diag(scales) for each term, one output at a time: a diagonal Fisher's root."""
    for j in range(scales.shape[-1]):
        column = torch.zeros_like(scales)
        column[..., j] = scales[..., j]
        yield column
