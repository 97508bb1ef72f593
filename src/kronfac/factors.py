"""The Kronecker factors of the Fisher and their moving average [MG15 §3, §5].

Names and layouts, 0-based, layer i being the i-th in the chain:

    A[i]      E[ā āᵀ] of layer i's inputs                       (in_i, in_i)
    G[i]      E[g gᵀ] of layer i's output gradients             (out_i, out_i)
    A_next[i] E[ā ā'ᵀ], ā' the inputs of layer i + 1             (in_i, in_{i+1})
    G_next[i] E[g g'ᵀ], g' the output gradients of layer i + 1   (out_i, out_{i+1})

The last two are kept for the block-tridiagonal inverse only; otherwise they are empty.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class KroneckerFactors:
    """Second moments of inputs and output gradients, a value: operations return new ones."""

    A: tuple[Tensor, ...]
    G: tuple[Tensor, ...]
    A_next: tuple[Tensor, ...] = ()
    G_next: tuple[Tensor, ...] = ()

    def averaged_with(self, new: "KroneckerFactors", decay: float) -> "KroneckerFactors":
        """decay · self + (1 − decay) · new [MG15 §5]."""
        if decay == 0:
            return new
        return self._zip(new, lambda old, estimate: torch.lerp(old, estimate, 1 - decay))

    def plus(self, other: "KroneckerFactors") -> "KroneckerFactors":
        """The sum, factor by factor, to accumulate over chunks."""
        return self._zip(other, torch.add)

    def scaled(self, A: float, G: float) -> "KroneckerFactors":
        """Input moments times A, gradient moments times G."""
        return KroneckerFactors(
            A=tuple(M * A for M in self.A),
            G=tuple(M * G for M in self.G),
            A_next=tuple(M * A for M in self.A_next),
            G_next=tuple(M * G for M in self.G_next),
        )

    def tensors(self) -> list[Tensor]:
        """All of them, for checks."""
        return [M for f in fields(self) for M in getattr(self, f.name)]

    def _zip(
        self, other: "KroneckerFactors", operation: Callable[[Tensor, Tensor], Tensor]
    ) -> "KroneckerFactors":
        return KroneckerFactors(
            *(
                tuple(
                    operation(a, b)
                    for a, b in zip(getattr(self, f.name), getattr(other, f.name), strict=True)
                )
                for f in fields(self)
            )
        )


def ema_decay(iteration: int, ceiling: float) -> float:
    """ε = min(1 − 1/k, ceiling) [MG15 §5]: a plain average at first, then an exponential one."""
    return min(1 - 1 / iteration, ceiling)
