"""y_j ~ Poisson(r_j), independent: counts."""

import torch
from torch import Tensor
from torch.nn import functional

from kronfac.objective.elementwise import ElementwiseLikelihood

BISECTIONS = 64
"""Halvings of the interval that a drawn count lies in, in integers: more than a float64 tells apart."""


class Poisson(ElementwiseLikelihood):
    """Counts with rates r: r = e^z and F_R = diag(e^z), or r = z + ε and F_R = diag(1/r).

    −log r(y|z) = r − y log r, without log y!, which does not depend on z.
    """

    def __init__(self, log_input: bool = True, eps: float = 1e-8) -> None:
        """z = log r if `log_input`, else z = r, to which `eps` is added as in `torch.nn.PoissonNLLLoss`."""
        super().__init__()
        if not 0 < eps < float("inf"):
            raise ValueError(f"Poisson needs a positive eps; got {eps}.")
        self.log_input = log_input
        self.eps = eps

    def rate(self, outputs: Tensor) -> Tensor:
        """The rate, which is positive."""
        return outputs.exp() if self.log_input else (outputs + self.eps).clamp(min=self.eps)

    def negative_log_likelihood(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.poisson_nll_loss(
            outputs, targets, log_input=self.log_input, eps=self.eps, reduction="sum"
        )

    def sample(self, outputs: Tensor, noise: Tensor) -> Tensor:
        """The smallest k with P(y ≤ k) = Γ(k + 1, r)/k! above `noise`, by bisection."""
        rate, u = self.rate(outputs).double(), noise.double()
        low, high = torch.full_like(rate, -1.0), (2 * rate + 64).ceil()
        for _ in range(BISECTIONS):
            middle = ((low + high) / 2).floor()
            above = torch.special.gammaincc(middle.clamp(min=0) + 1, rate) > u
            high = torch.where(above & (middle > low), middle, high)
            low = torch.where(above, low, middle)
        return high.to(outputs.dtype)

    def score(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rate = self.rate(outputs)
        return rate - targets if self.log_input else 1 - targets / rate

    def fisher_diagonal(self, outputs: Tensor) -> Tensor:
        rate = self.rate(outputs)
        return rate if self.log_input else 1 / rate

    def extra_repr(self) -> str:
        return f"log_input={self.log_input}, eps={self.eps}"
