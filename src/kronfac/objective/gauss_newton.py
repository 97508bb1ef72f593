"""`kronfac.GaussNewton`: any loss that is convex in the outputs, by the generalised Gauss–Newton matrix.

The matrix is JᵀHJ, with H = ∂²loss/∂z² of each term from autograd, in place of the Fisher JᵀF_R J [MG15
§2.1]. For the negative log-likelihood of an exponential family in its natural parameters they are the same.
"""

import copy
from collections.abc import Callable, Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn

from kronfac.errors import TargetError, UnsupportedLossError
from kronfac.objective.terms import Likelihood, signs, unit_columns
from kronfac.warn import warn

TOLERANCE = 64
"""Relative difference, in ε of the dtype, up to which two sums count as equal."""


class GaussNewton(Likelihood):
    """A loss (outputs, targets) → scalar with the curvature H = ∂²loss/∂z² of each of its terms.

    The terms are along the first dimension of outputs and targets, and the loss is a mean or a sum over
    them: Σ_t ℓ(z_t, y_t), divided by their number for a mean. If ℓ is not convex, negative eigenvalues of H
    count as 0. With d outputs per term it costs two backward passes through the loss if H is diagonal, else
    d passes and the eigendecomposition of H (d, d).

    Example:
        >>> optimizer = kronfac.KFAC(model, kronfac.GaussNewton(nn.SoftMarginLoss()))
    """

    uses_targets: ClassVar[bool] = True
    needs_targets: ClassVar[bool] = True

    def __init__(
        self, loss: Callable[[Tensor, Tensor], Tensor], reduction: str | None = None
    ) -> None:
        """`reduction` is "mean" or "sum" over the terms; None for the loss's own, or else "mean"."""
        super().__init__()
        found = str(getattr(loss, "reduction", "mean")) if reduction is None else reduction
        if found not in ("mean", "batchmean", "sum"):
            raise UnsupportedLossError(
                f"GaussNewton needs a loss with reduction 'mean' or 'sum', a scalar; got {found!r}."
            )
        self.loss = loss
        self.summed = found == "sum"
        self._compared = False
        self._event: torch.Size | None = None

    @property
    def reduction(self) -> str:
        """What the loss is over its terms: "sum" or "mean"."""
        return "sum" if self.summed else "mean"

    def arrange(self, outputs: Tensor, targets: Tensor) -> "tuple[GaussNewton, Tensor]":
        self.check(outputs, targets)
        targets = targets.detach()
        self.check_terms(outputs, targets)
        return self._for_event(outputs.shape[1:]), targets

    def _for_event(self, event: torch.Size) -> "GaussNewton":
        """The likelihood for outputs whose event, flat in `Terms`, has this shape."""
        result = copy.copy(self)
        result._event = event
        return result

    def reduced(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.loss(outputs, targets)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Σ_t ℓ(z_t, y_t)."""
        if self._event is not None:
            outputs = outputs.reshape(len(outputs), *self._event)
        loss = self.loss(outputs, targets)
        if loss.dim():
            raise UnsupportedLossError(
                f"GaussNewton needs a loss that is a scalar; got the shape {tuple(loss.shape)}."
            )
        return loss if self.summed else loss * len(outputs)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            value = self.negative_log_likelihood(leaf, targets)
        (slope,) = torch.autograd.grad(value, leaf)
        return slope

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """H^½ ε with random signs ε, so that E[r rᵀ] = H."""
        root = self._root(outputs)
        ends = signs(noise)
        return root * ends if root.dim() == 2 else (root @ ends.unsqueeze(-1)).squeeze(-1)

    def fisher_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        root = self._root(outputs)
        if root.dim() == 2:
            return root.square() * vectors
        return (root @ (root.mT @ vectors.unsqueeze(-1))).squeeze(-1)

    def fisher_root_columns(self, outputs: Tensor) -> Iterator[Tensor]:
        root = self._root(outputs)
        return unit_columns(root) if root.dim() == 2 else iter(root.unbind(dim=-1))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if not outputs.dim() or not targets.dim() or len(outputs) != len(targets):
            raise TargetError(
                "GaussNewton needs outputs and targets with the terms as their first dimension; got "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}."
            )

    @torch.no_grad()
    def check_terms(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse a loss that is not a mean, or sum, over its terms; warn of a loss without curvature.

        Checked once, because the host waits for the result.

        Raises:
            UnsupportedLossError: the loss is not a mean, or sum, over its terms.
        """
        if self._compared or len(outputs) < 2:
            return
        self._compared = True
        half = len(outputs) // 2
        whole = self.negative_log_likelihood(outputs, targets).double()
        parts = [
            self.negative_log_likelihood(outputs[part], targets[part]).double()
            for part in (slice(half), slice(half, None))
        ]
        size = float(sum(part.abs() for part in parts))
        eps = torch.finfo(outputs.dtype).eps
        if abs(float(whole - parts[0] - parts[1])) > TOLERANCE * eps * size:
            raise UnsupportedLossError(
                f"GaussNewton needs a loss that is a {self.reduction} over its terms (dimension 0); "
                f"the loss of {len(outputs)} terms does not follow from the losses of its two halves. If "
                f"it is a {'mean' if self.summed else 'sum'}, pass reduction=. A loss whose terms depend "
                "on each other, or that divides by a number of targets, is not supported."
            )
        given = self._for_event(outputs.shape[1:]).given(targets)
        if not bool(given._root(outputs.flatten(1)).any()):
            warn(
                "The Hessian of the loss that GaussNewton was given is 0 at all outputs of the first "
                "mini-batch, like that of a linear loss: KFAC has no curvature but its damping. Use a loss "
                "of logits instead of log-probabilities, or one with curvature, such as HuberLoss.",
            )

    def _root(self, outputs: Tensor) -> Tensor:
        """A root of H without its negative part: (terms, event) if it is diagonal, else (…, event)."""
        assert self._targets is not None
        targets = self._targets
        leaf = outputs.detach().requires_grad_()
        with torch.enable_grad():
            value = self.negative_log_likelihood(leaf, targets)
            (slope,) = torch.autograd.grad(value, leaf, create_graph=True)

        def product(vectors: Tensor) -> Tensor:
            if not slope.requires_grad:  # a linear loss
                return torch.zeros_like(outputs)
            (found,) = torch.autograd.grad(
                slope, leaf, vectors, retain_graph=True, allow_unused=True
            )
            return torch.zeros_like(outputs) if found is None else found

        diagonal = product(torch.ones_like(outputs))
        if outputs.shape[1] == 1 or _diagonal(diagonal, product):
            return diagonal.clamp(min=0).sqrt()
        columns = []
        for j in range(outputs.shape[1]):
            basis = torch.zeros_like(outputs)
            basis[:, j] = 1
            columns.append(product(basis))
        H = torch.stack(columns, dim=-1)  # (terms, event, event)
        if not bool(H.isfinite().all()):
            return torch.full_like(H, float("nan"))  # the step will be refused
        values, vectors = torch.linalg.eigh((H + H.mT) / 2)
        # The symmetric root: eigenvectors alone may change with the last digit of H.
        root: Tensor = (vectors * values.clamp(min=0).sqrt().unsqueeze(-2)) @ vectors.mT
        return root

    def extra_repr(self) -> str:
        own = "" if isinstance(self.loss, nn.Module) else f"{self.loss!r}, "
        return f"{own}reduction={self.reduction!r}"


def _diagonal(sums: Tensor, product: Callable[[Tensor], Tensor]) -> bool:
    """Whether H p = (H 1) ⊙ p for an irregular p, which practically only diagonal matrices satisfy."""
    event = sums.shape[1]
    # Fractional parts of multiples of the golden ratio: they have no linear relation with small integers.
    probe = (torch.arange(1, event + 1, device=sums.device) * 0.6180339887498949) % 1 + 0.5
    probe = probe.to(sums.dtype).expand_as(sums)
    found, expected = product(probe), sums * probe
    tolerance = TOLERANCE * torch.finfo(sums.dtype).eps * expected.abs().amax()
    return bool((found - expected).abs().amax() <= tolerance)
