"""A loss call as terms, s Σ_t w_t · −log r(y_t | z_t), and the likelihood r of a term [MG15 §2.1].

A term is one prediction: the class of an example, one token, the class of one pixel, the regression targets
of one example. Its curvature in output space is s w_t F_R(z_t). Layout: outputs z are (terms, event).
"""

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_variadic

from kronfac.errors import ClosureError, TargetError
from kronfac.linalg import take

L = TypeVar("L", bound="Likelihood")


@dataclass(frozen=True)
class Terms:
    """The terms of one loss call."""

    likelihood: "Likelihood"
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
        """The terms of Σ each ⊙ loss, for a loss without reduction and a number per term or output."""
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


class Likelihood(nn.Module, ABC):
    """A predictive distribution; called as a loss it is the mean of −log r(y|z) over the terms.

    A term's negative log-probability is summed over its outputs. So the loss is the paper's objective
    h(θ) = E[−log p(y|x, θ)], not divided by the number of outputs.
    """

    saturates: ClassVar[bool] = False
    """Whether the score is a difference of probabilities. It has no correct digits if a term is almost
    certain: if −log r is as small as the dtype's ε."""
    uses_targets: ClassVar[bool] = False
    """Whether its curvature depends on the targets."""
    needs_targets: ClassVar[bool] = False
    """Whether it is not even defined without them, as that of `GaussNewton`."""
    _targets: Tensor | None = None
    summed: bool = False
    """Whether, called as a loss, it is a sum over the terms; else it is a mean."""

    def given(self: L, targets: Tensor) -> L:
        """The likelihood of terms with these targets: itself, unless its curvature depends on them."""
        if not self.uses_targets:
            return self
        result = copy.copy(self)
        result._targets = targets
        return result

    def arrange(self, outputs: Tensor, targets: Tensor) -> "tuple[Likelihood, Tensor]":
        """Check the targets; return the likelihood for flat events, and the targets as `Terms` has them."""
        self.check(outputs, targets)
        targets = targets.detach()
        return self, rows(outputs, targets) if targets.shape == outputs.shape else targets

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over terms of −log r(y|z)."""
        return likelihood_loss(self, outputs, targets)

    def reduced(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The value of a call: the mean over terms, or the sum if it is `summed`."""
        return self.negative_log_likelihood(outputs, targets) / len(outputs)

    @abstractmethod
    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Σ over terms of −log r(y|z), up to constants."""

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        """The random numbers for `draws` targets of each term, (draws, terms, …); uniform in [0, 1).

        It is separate from `sample` because numbers drawn in other chunks would be different: they are
        drawn for fixed blocks of the terms of all chunks and ranks (`curvature/fisher.py`).
        """
        return torch.rand(
            (draws, *outputs), dtype=like.dtype, device=like.device, generator=generator
        )

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """Targets y ~ R_{y|z}, a deterministic function of z and one draw of `noise`.

        Raises:
            TypeError: this likelihood draws scores only (`sampled_score`).
        """
        raise TypeError(f"{type(self).__name__} draws scores and no targets: call sampled_score.")

    @abstractmethod
    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """∂(−log r(y|z))/∂z, (terms, event)."""

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """The score at a target drawn from R_{y|z}: E[score scoreᵀ] = F_R."""
        return self.score(outputs, self.sample(outputs, noise))

    @abstractmethod
    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """F_R v for each term; `vectors` is (…, terms, event)."""

    @abstractmethod
    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        """Vectors r₁, r₂, … (terms, event) with Σ_j r_j r_jᵀ = F_R."""

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse targets of another shape, which might broadcast without an error."""
        if targets.shape != outputs.shape:
            raise TargetError(
                f"KFAC reads this loss as {type(self).__name__}, which needs targets of the outputs' shape "
                f"{tuple(outputs.shape)}; got {tuple(targets.shape)}. Reshape the targets or the outputs "
                "before the loss, as with targets.view_as(outputs)."
            )

    def _positive(self, name: str, value: float) -> float:
        """A positive, finite argument of the constructor."""
        if not 0 < value < math.inf:
            raise ValueError(f"{type(self).__name__} needs a positive {name}; got {value}.")
        return value

    def extra_repr(self) -> str:
        """The constructor's arguments, from the attributes of the same names."""
        names = [name for name in inspect.signature(type(self)).parameters if hasattr(self, name)]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def likelihood_loss(likelihood: Likelihood, outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over terms of −log r(y|z); K-FAC can see calls of this function, as of torch's losses."""
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


class ElementwiseLikelihood(Likelihood):
    """A diagonal Fisher: F_R = diag(f(z)) with f from `fisher_diagonal`."""

    @abstractmethod
    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        """f, (terms, event), at least 0."""

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """±√f with a random sign.

        Its second moment is F_R, like that of the score at a drawn target. But the square of each element
        is exactly f, not only on average.
        """
        return self.fisher_diagonal(outputs).sqrt() * signs(noise)

    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return self.fisher_diagonal(outputs) * vectors

    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        return unit_columns(self.fisher_diagonal(outputs).sqrt())


def rows(outputs: Tensor, values: Tensor) -> Tensor:
    """Values of the outputs' shape as (terms, event)."""
    return values.expand_as(outputs).reshape(len(outputs) if outputs.dim() else 1, -1)


def signs(noise: Tensor) -> Tensor:
    """−1 or 1, equally probable, from uniform numbers."""
    return torch.where(noise < 0.5, -1.0, 1.0).to(noise.dtype)
