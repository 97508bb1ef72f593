"""y ~ Categorical(softmax(z)): classification."""

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kronfac.errors import TargetError
from kronfac.objective.base import Likelihood


class Categorical(Likelihood):
    """One of K classes with logits z: F_R = diag(p) − p pᵀ, p = softmax(z).

    Targets are class indices (terms,) or distributions over the classes (terms, K). Label smoothing
    ε replaces a target q by (1 − ε) q + ε/K, which leaves the Fisher as it is.
    """

    saturates: ClassVar[bool] = True

    def __init__(self, label_smoothing: float = 0.0) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing is a fraction in [0, 1]; got {label_smoothing}.")
        self.label_smoothing = label_smoothing

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(
            outputs, targets, reduction="sum", label_smoothing=self.label_smoothing
        )

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        return torch.rand(
            (draws, outputs[0]), dtype=like.dtype, device=like.device, generator=generator
        )

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """The inverse of the cumulative distribution at `noise`."""
        cumulative = outputs.softmax(dim=-1).cumsum(dim=-1)
        # Rounding may leave the last sum below a draw close to 1: the last class takes it.
        index = torch.searchsorted(cumulative, noise.unsqueeze(-1), right=True).squeeze(-1)
        return index.clamp_(max=outputs.shape[-1] - 1)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        p, smoothing = outputs.softmax(dim=-1), self.label_smoothing
        uniform = smoothing / outputs.shape[-1]
        if not targets.is_floating_point():
            return _less_at_(p - uniform if smoothing else p, targets, 1 - smoothing)
        q = (1 - smoothing) * targets + uniform
        # softmax · Σq, not softmax: the gradient of −Σ q log p also if q does not sum to one.
        return p * q.sum(dim=-1, keepdim=True) - q

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """softmax(z) − e_y: without the label smoothing, which is of the training targets alone."""
        return _less_at_(outputs.softmax(dim=-1), self.sample(outputs, noise), 1.0)

    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        p = outputs.softmax(dim=-1)
        weighted = p * vectors
        return weighted - p * weighted.sum(dim=-1, keepdim=True)

    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        """√p_j (e_j − p), as Σ_j p_j (e_j − p)(e_j − p)ᵀ = diag(p) − p pᵀ."""
        p = outputs.softmax(dim=-1)
        for j in range(outputs.shape[-1]):
            column = -p.clone()
            column[:, j] += 1
            yield p[:, j : j + 1].sqrt() * column

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        classes = outputs.shape[-1]
        indices = not targets.is_floating_point() and targets.shape == outputs.shape[:1]
        distributions = targets.is_floating_point() and targets.shape == outputs.shape
        if outputs.dim() != 2 or not (indices or distributions):
            raise TargetError(
                f"Categorical needs class indices of shape ({len(outputs)},) and an integer dtype, or "
                f"distributions of shape ({len(outputs)}, {classes}) and a floating one, for outputs "
                f"of shape {tuple(outputs.shape)}; got {tuple(targets.shape)}, {targets.dtype}."
            )

    def extra_repr(self) -> str:
        return f"label_smoothing={self.label_smoothing}"


def _less_at_(p: Tensor, index: Tensor, amount: float) -> Tensor:
    """p − amount · e_y, written into p; not by `one_hot`, which asks the device for its largest index."""
    at = index.unsqueeze(-1)
    return p.scatter_add_(-1, at, p.new_full((), -amount).expand(at.shape))
