"""Predictive distributions R_{y|z} with natural parameters z, one class for each [MG15 §2.1].

Layout: outputs z are (terms, event). All quantities are per term and without weights, which are in `Terms`.
"""

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from kronfac.errors import TargetError
from kronfac.objective.terms import ElementwiseLikelihood, Likelihood


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=like.dtype, device=like.device, generator=generator)


class Gaussian(ElementwiseLikelihood):
    """N(z, σ² I): −log r = ‖y − z‖² / 2σ² up to a constant; F_R = I / σ²."""

    def __init__(self, variance: float = 1.0) -> None:
        """σ² = `variance`; the default makes the loss ½ ‖y − z‖²."""
        super().__init__()
        self.variance = self._positive("variance", variance)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum() / (2 * self.variance)

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        return _normal((draws, *outputs), like, generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return outputs + noise * math.sqrt(self.variance)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) / self.variance

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """(z − (z + σε)) / σ² = −ε/σ. By `score`, outputs of 1e10 would round ε away."""
        return noise / -math.sqrt(self.variance)

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / self.variance)


class Residual(Gaussian):
    """`Gaussian` for outputs that are residuals, with targets drawn as z ± σ, each output by itself.

    E[r rᵀ] = F_R as for normal draws. If a term is a single number, r² = 1/σ² for every draw: the sampled
    Fisher is then exact, at the same cost.
    """

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        signs = torch.randint(2, (draws, *outputs), device=like.device, generator=generator)
        return (2 * signs - 1).to(like.dtype)


class Bernoulli(ElementwiseLikelihood):
    """Independent Bernoulli outputs with logits z: F_R = diag(p (1 − p)), p = σ(z).

    Targets may be any numbers in [0, 1], such as the grey levels of an image.
    """

    saturates: ClassVar[bool] = True
    sampled_score = Likelihood.sampled_score

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs, targets, reduction="sum")

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return (noise < outputs.sigmoid()).to(outputs.dtype)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sigmoid() - targets

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        p = outputs.sigmoid()
        return p * (1 - p)


SMALLEST_VARIANCE = 1e-12
"""Lower bound of p (1 − p), the same as in torch's gradient. After a saturated sigmoid the Jacobian is 0,
and the curvature should be 0 too, not 0 · 1/0."""


class BernoulliProbability(ElementwiseLikelihood):
    """Independent Bernoulli outputs with probabilities z = p: F_R = diag(1 / (p (1 − p)))."""

    saturates: ClassVar[bool] = True

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy(outputs, targets, reduction="sum")

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) * self.fisher_diagonal(outputs)

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        return 1 / (outputs * (1 - outputs)).clamp(min=SMALLEST_VARIANCE)


class Categorical(Likelihood):
    """One of K classes with logits z: F_R = diag(p) − p pᵀ, p = softmax(z).

    Targets are class indices (terms,) or distributions over the classes (terms, K). Label smoothing ε
    replaces a target q by (1 − ε) q + ε/K, which does not change the Fisher.
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
        return super().noise(draws, outputs[:1], like, generator)

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """The inverse of the cumulative distribution at `noise`."""
        cumulative = outputs.softmax(dim=-1).cumsum(dim=-1)
        # By rounding, the last sum may be below a draw close to 1, which is then of the last class.
        index = torch.searchsorted(cumulative, noise.unsqueeze(-1), right=True).squeeze(-1)
        return index.clamp_(max=outputs.shape[-1] - 1)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        p, smoothing = outputs.softmax(dim=-1), self.label_smoothing
        uniform = smoothing / outputs.shape[-1]
        if not targets.is_floating_point():
            return _less_at_(p - uniform if smoothing else p, targets, 1 - smoothing)
        q = (1 - smoothing) * targets + uniform
        # softmax · Σq: the gradient of −Σ q log p also if q does not sum to one.
        return p * q.sum(dim=-1, keepdim=True) - q

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """softmax(z) − e_y, without label smoothing, which is only for training targets."""
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


def _less_at_(p: Tensor, index: Tensor, amount: float) -> Tensor:
    """p − amount · e_y, written into p. `one_hot` would wait for the device to find its largest index."""
    at = index.unsqueeze(-1)
    return p.scatter_add_(-1, at, p.new_full((), -amount).expand(at.shape))


class Poisson(ElementwiseLikelihood):
    """Counts with rates r: r = e^z and F_R = diag(e^z), or r = z + ε and F_R = diag(1/r).

    −log r(y|z) = r − y log r, without log y!, which does not depend on z.
    """

    def __init__(self, log_input: bool = True, eps: float = 1e-8) -> None:
        """z = log r if `log_input`, else z = r, to which `eps` is added as in `torch.nn.PoissonNLLLoss`."""
        super().__init__()
        self.log_input = log_input
        self.eps = self._positive("eps", eps)

    def rate(self, outputs: Tensor) -> Tensor:
        """The rate, which is positive."""
        return outputs.exp() if self.log_input else (outputs + self.eps).clamp(min=self.eps)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.poisson_nll_loss(
            outputs, targets, log_input=self.log_input, eps=self.eps, reduction="sum"
        )

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rate = self.rate(outputs)
        return rate - targets if self.log_input else 1 - targets / rate

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        rate = self.rate(outputs)
        return rate if self.log_input else 1 / rate


class Huber(ElementwiseLikelihood):
    """c · Σ_j ρ_δ(z_j − y_j), ρ_δ(r) = r²/2 if |r| ≤ δ, else δ (|r| − δ/2).

    Its curvature is c · diag(min(1, δ/|r_j|)): that of the parabola that touches the loss at r and −r and
    is above it elsewhere, as in iteratively reweighted least squares.

    Deviation: this is neither the Fisher nor the Hessian. The Hessian is 0 if |r| > δ, so that examples
    with large residuals would have a gradient but no curvature; `GaussNewton(torch.nn.HuberLoss())` uses
    it.
    """

    uses_targets: ClassVar[bool] = True

    def __init__(self, delta: float = 1.0, curvature: float = 1.0) -> None:
        """δ = `delta`; c = `curvature`, which is 1/β for `torch.nn.SmoothL1Loss` with δ = β."""
        super().__init__()
        self.delta = self._positive("delta", delta)
        self.curvature = self._positive("curvature", curvature)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.huber_loss(outputs, targets, delta=self.delta, reduction="sum")
        return self.curvature * loss

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.curvature * (outputs - targets).clamp(-self.delta, self.delta)

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        """c min(1, δ/|r|), or its upper bound c if the targets are unknown."""
        if self._targets is None:
            return torch.full_like(outputs, self.curvature)
        size = (outputs - self._targets).abs().clamp(min=self.delta)
        return self.curvature * self.delta / size


class HeteroscedasticGaussian(ElementwiseLikelihood):
    """Independent Gaussians with outputs z = (μ, v): F_R = diag(1/v, 1/(2v²)).

    −log r = ½ Σ_j (log v_j + (y_j − μ_j)²/v_j) up to a constant. The network makes v positive, by an
    exponential or softplus, for example.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        """Variances below `eps` count as `eps`, as in `torch.nn.GaussianNLLLoss`."""
        super().__init__()
        self.eps = self._positive("eps", eps)

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = outputs.chunk(2, dim=-1)
        # With the gradient of the unclamped variance: a variance below `eps` could not grow otherwise.
        return mean, variance + (variance.clamp(min=self.eps) - variance).detach()

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self._split(outputs)
        return (variance.log() + (mean - targets).square() / variance).sum() / 2

    def noise(
        self, draws: int, outputs: torch.Size, like: Tensor, generator: torch.Generator
    ) -> Tensor:
        return _normal((draws, outputs[0], outputs[1] // 2), like, generator)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self._split(outputs)
        residual = (mean - targets) / variance
        return torch.cat((residual, (1 / variance - residual.square()) / 2), dim=-1)

    def sampled_score(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """(−ε/√v, (1 − ε²)/2v). By `score`, means of 1e10 would round ε away."""
        _, variance = self._split(outputs)
        return torch.cat((-noise / variance.sqrt(), (1 - noise.square()) / (2 * variance)), dim=-1)

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        _, variance = self._split(outputs)
        return torch.cat((1 / variance, 1 / (2 * variance.square())), dim=-1)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        if outputs.dim() != 2 or outputs.shape[1] % 2:
            raise TargetError(
                "HeteroscedasticGaussian needs outputs (terms, 2d), d means and then d variances; got "
                f"{tuple(outputs.shape)}. torch.cat((mean, variance), dim=1) makes them."
            )
        expected = (len(outputs), outputs.shape[1] // 2)
        if tuple(targets.shape) != expected:
            raise TargetError(
                f"HeteroscedasticGaussian needs targets of shape {expected}, one for each mean; got "
                f"{tuple(targets.shape)}."
            )
