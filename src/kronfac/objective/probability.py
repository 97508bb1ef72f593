"""y_j ~ Bernoulli(p_j) with the probabilities themselves as outputs, as `torch.nn.BCELoss` has it."""

from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from kronfac.objective.elementwise import ElementwiseLikelihood

SMALLEST_VARIANCE = 1e-12
"""Lower bound of p (1 − p), which is also that of torch's gradient. Behind a sigmoid that is saturated the
Jacobian is 0, and so is the curvature: 0 · 1/0 would be none."""


class BernoulliProbability(ElementwiseLikelihood):
    """Independent Bernoulli outputs with probabilities z = p: F_R = diag(1 / (p (1 − p)))."""

    saturates: ClassVar[bool] = True

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy(outputs, targets, reduction="sum")

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        return (noise < outputs).to(outputs.dtype)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) * self.fisher_diagonal(outputs)

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        return 1 / (outputs * (1 - outputs)).clamp(min=SMALLEST_VARIANCE)
