"""The definition of the everyday optimizer, one weight at a time, by singular values and eigenvectors.

It imports nothing of kronfac. `train` is a loop that keeps every gradient and every layer's inputs.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

POLYNOMIALS = (
    (8.157, -22.48, 15.88),
    (4.043, -2.809, 0.5000),
    (3.892, -2.772, 0.5061),
    (3.286, -2.368, 0.4645),
    (2.347, -1.710, 0.4232),
)


def polar(M: Tensor) -> Tensor:
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    s = s / (1.02 * s.square().sum().sqrt())
    for a, b, c in POLYNOMIALS:
        s = a * s + b * s**3 + c * s**5
    return U @ torch.diag(s) @ Vh


class Weight:
    """One weight matrix (rows, columns) under the optimizer, split into `parts` of its rows."""

    def __init__(self, W: Tensor, method: str, lr: float, decay: float, parts: int = 1) -> None:
        self.W, self.method, self.lr, self.decay, self.parts = W.clone(), method, lr, decay, parts
        self.M = torch.zeros_like(W)
        self.A: Tensor | None = None
        self.inverse: Tensor | None = None
        self.samples = 0

    def sample(self, a: Tensor) -> None:
        """Inputs (rows, columns) of a pass whose A counts, and a new inverse."""
        A = a.mT @ a / len(a)
        self.samples += 1
        keep = min(1 - 1 / self.samples, 0.9)
        self.A = A if self.A is None else keep * self.A + (1 - keep) * A
        n, mean = len(A), self.A.trace() / len(A)
        if self.method == "polar":
            self.inverse = torch.linalg.inv(self.A + 0.2 * mean * torch.eye(n, dtype=A.dtype))
        else:
            s, V = torch.linalg.eigh(self.A / mean + 0.03 * torch.eye(n, dtype=A.dtype))
            self.inverse = V @ torch.diag(s ** (-0.5)) @ V.mT

    def step(self, g: Tensor) -> None:
        self.M = 0.9 * self.M + 0.1 * g
        m = 0.1 * g + 0.9 * self.M
        m = m if self.inverse is None else m @ self.inverse
        self.W = (1 - self.lr * self.decay) * self.W
        for rows in torch.arange(len(g)).chunk(self.parts):
            X = polar(m[rows]) if self.method == "polar" else m[rows]
            self.W[rows] -= self.lr * 0.2 * math.sqrt(X.numel()) * X / X.norm()


class Adam:
    """A parameter under AdamW."""

    def __init__(self, W: Tensor, lr: float, decay: float) -> None:
        self.W, self.lr, self.decay = W.clone(), lr, decay
        self.m, self.v, self.k = torch.zeros_like(W), torch.zeros_like(W), 0

    def step(self, g: Tensor) -> None:
        self.k += 1
        self.m = 0.9 * self.m + 0.1 * g
        self.v = 0.95 * self.v + 0.05 * g**2
        m, v = self.m / (1 - 0.9**self.k), self.v / (1 - 0.95**self.k)
        self.W = (1 - self.lr * self.decay) * self.W - self.lr * m / (v.sqrt() + 1e-8)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """The gradients and the inputs of Linear layers in every step, by name."""
    gradients, inputs = [], []
    for x, y in batches:
        seen: dict[str, Tensor] = {}
        handles = [
            module.register_forward_hook(
                lambda m, a, z, name=name, seen=seen: seen.update(
                    {name: a[0].detach().flatten(0, -2)}
                )
            )
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        ]
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()
        for handle in handles:
            handle.remove()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        inputs.append(seen)
    return gradients, inputs
