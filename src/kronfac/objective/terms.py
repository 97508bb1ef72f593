"""A loss call as terms: s Σ_t w_t · −log r(y_t | z_t), one summand per term.

A term is one prediction: the class of an example, one token, the class of one pixel, the regression targets
of one example. Its curvature in output space is s w_t F_R(z_t). Layout: outputs z are (terms, event).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from kronfac.errors import ClosureError
from kronfac.linalg import take
from kronfac.objective.likelihoods import Likelihood


@dataclass(frozen=True)
class Terms:
    """The terms of one loss call."""

    likelihood: Likelihood
    """R_{y|z}, with the targets if its curvature depends on them."""
    shape: torch.Size
    """The shape of the outputs that the loss was called with."""
    scale: float = 1.0
    """s."""
    weight: Tensor | None = None
    """w, (terms,) or (terms, event); None for ones. It includes a normalisation that depends on the
    targets, such as the number of those that are not ignored, so that the host need not wait for the
    device."""
    targets: Tensor | None = None
    """(terms, event), class indices (terms,), or (terms, …) if the likelihood arranges them itself; None if
    unknown."""
    summed: bool = False
    """Whether the loss is a sum over its terms; else it is a mean."""
    channels: bool = False
    """Whether the event is dimension 1 of the outputs, as in torch's (N, C, d₁, …), or their only
    dimension; else it is all dimensions but the first."""
    denominator: Tensor | None = None
    """The divisor of a mean that is contained in the weights, such as the number of targets not ignored."""

    def __post_init__(self) -> None:
        if self.targets is not None:
            object.__setattr__(self, "likelihood", self.likelihood.given(self.targets))
        elif self.likelihood.needs_targets:
            raise ClosureError(
                f"The curvature of {type(self.likelihood).__name__} depends on the targets, but KFAC saw "
                "no call of it in the closure. Call the loss that KFAC was given with the model's outputs, "
                "or pass targets to kronfac.observe."
            )

    @cached_property
    def event(self) -> int:
        """The number of outputs of a term."""
        return self.shape[self._channel] if self.channels else self.shape[1:].numel()

    @property
    def _channel(self) -> int:
        return min(1, len(self.shape) - 1)

    @cached_property
    def count(self) -> int:
        """The number of terms."""
        return self.shape.numel() // max(self.event, 1)

    def matrix(self, outputs: Tensor) -> Tensor:
        """Outputs as (terms, event), from the loss call's shape; tangents (k, …) keep their k."""
        if len(self.shape) == 2 and outputs.shape == self.shape:
            return outputs
        extra = outputs.dim() - len(self.shape)
        if self.channels:
            outputs = outputs.movedim(self._channel + extra, -1)
        return outputs.reshape(*outputs.shape[:extra], self.count, self.event)

    def select(self, index: Tensor | slice, shape: torch.Size) -> "Terms":
        """The terms with these indices, for outputs of this shape."""
        return replace(
            self,
            shape=shape,
            weight=None if self.weight is None else take(self.weight, index),
            targets=None if self.targets is None else take(self.targets, index),
        )

    def scaled(self, factor: float | Tensor) -> "Terms":
        """The terms of the loss times a factor."""
        if not isinstance(factor, Tensor):
            summed = self.summed and factor == 1
            return replace(self, scale=self.scale * factor, summed=summed)
        weight = factor.expand(self.count) if self.weight is None else self.weight * factor
        return replace(self, weight=weight, summed=False)

    def weighed_by(self, each: Tensor) -> "Terms":
        """The terms of Σ each ⊙ loss, for a loss without reduction: one number per term, or per output."""
        each = each.reshape(self.count, -1)
        if self.channels:
            each = each.squeeze(1)
        elif each.shape[1] < self.event:  # a mean and a variance share one loss
            each = each.repeat(1, self.event // each.shape[1])
        weight = each if self.weight is None else self.weight * each
        return replace(self, weight=weight, summed=False)

    @property
    def divisor(self) -> float:
        """The divisor of the sum over terms; for a mean it is proportional to their number."""
        divided = 1.0 if self.denominator is None else float(self.denominator)
        return divided / self.scale if self.scale else math.nan

    @property
    def total_weight(self) -> float:
        """Σ_t s w_t: 1 for a mean over terms, their number for a sum."""
        weights = None if self.weight is None else float(self.weight.sum(dtype=torch.float64))
        return self.total_of(weights)

    def total_of(self, weights: float | None) -> float:
        """`total_weight`, if the sum of the weights was read from the device before."""
        if self.weight is None or weights is None:
            return self.scale * self.count
        places = self.event if self.weight.dim() == 2 else 1
        return self.scale * weights / places

    def weigh(self, vectors: Tensor, scale: float = 1.0) -> Tensor:
        """(s w / scale) ⊙ v for vectors (…, terms, event); the vectors themselves if that is 1."""
        return self._times(vectors, self.scale / scale, root=False)

    def weigh_by_root(self, vectors: Tensor, scale: float = 1.0) -> Tensor:
        """√(s w / scale) ⊙ v: E[v vᵀ] = F_R becomes E[r rᵀ] = (s w / scale) F_R."""
        return self._times(vectors, self.scale / scale, root=True)

    def _times(self, vectors: Tensor, scale: float, root: bool) -> Tensor:
        if self.weight is None:
            return vectors if scale == 1 else vectors * (scale**0.5 if root else scale)
        weight = self.weight if self.weight.dim() == 2 else self.weight.unsqueeze(-1)
        weight = weight.to(vectors.dtype) * scale
        return vectors * (weight.sqrt() if root else weight)
