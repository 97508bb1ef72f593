"""The Kronecker factors of the Fisher and their moving average [MG15 §3, §5].

Names and layouts, 0-based, layer i being the i-th in the chain:

    A[i]      E[ā āᵀ] of layer i's inputs                       (in_i, in_i)
    G[i]      E[g gᵀ] of layer i's output gradients             (out_i, out_i)
    A_next[i] E[ā ā'ᵀ], ā' the inputs of layer i + 1             (in_i, in_{i+1})
    G_next[i] E[g g'ᵀ], g' the output gradients of layer i + 1   (out_i, out_{i+1})

The last two are kept for the block-tridiagonal inverse only; otherwise they are empty.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

CEILING = 0.95
"""Of the moving averages' decay, in the paper: they remember 20 iterations."""


@dataclass(frozen=True)
class KroneckerFactors:
    """Second moments of inputs and output gradients: a value."""

    A: tuple[Tensor, ...]
    G: tuple[Tensor, ...]
    A_next: tuple[Tensor, ...] = ()
    G_next: tuple[Tensor, ...] = ()
    cases: float = math.inf
    """How many cases of equal weight would be as sure an estimate."""


class MovingAverage:
    """ε · previous + (1 − ε) · (weighted sums of products), without a pass over memory of its own.

    Decay, weight and sum are folded into the matrix products that make the estimate; `previous` is
    only read.
    """

    def __init__(self, previous: KroneckerFactors | None, decay: float, neighbours: bool) -> None:
        """ε = `decay`; without a previous value the estimate counts in full."""
        self._previous = previous
        self._decay = decay if previous is not None else 0.0
        self._neighbours = neighbours
        self._moments: dict[str, tuple[Tensor, ...]] = {}

    def add(self, name: str, rows: Sequence[Tensor], weight: float) -> None:
        """Add weight · Σ x xᵀ over the rows (rows, features) of each layer to the moments `name`.

        With neighbours, also weight · Σ x x'ᵀ, x' the same row of the next layer.
        """
        self._add(name, [(x, x) for x in rows], weight)
        if self._neighbours:
            self._add(f"{name}_next", list(pairwise(rows)), weight)

    def _add(self, name: str, pairs: list[tuple[Tensor, Tensor]], weight: float) -> None:
        weight *= 1 - self._decay
        if name in self._moments:
            for M, (x, y) in zip(self._moments[name], pairs, strict=True):
                M.addmm_(x.mT, y, alpha=weight)
        elif self._previous is None or self._decay == 0:
            self._moments[name] = tuple((x.mT @ y).mul_(weight) for x, y in pairs)
        else:
            self._moments[name] = tuple(
                torch.addmm(M, x.mT, y, beta=self._decay, alpha=weight)
                for M, (x, y) in zip(getattr(self._previous, name), pairs, strict=True)
            )

    def value(self, cases: int) -> KroneckerFactors:
        """The average with everything that was added, which was of so many cases."""
        variance = (1 - self._decay) ** 2 / cases
        if self._previous is not None:
            variance += self._decay**2 / self._previous.cases
        return KroneckerFactors(**self._moments, cases=1 / variance)


def sampling_error(factors: KroneckerFactors) -> float:
    """The damping of A ⊗ G that makes up for its having been estimated from n cases.

    The inverse of a second moment of d features is too large on average, by a share of about d/n of what
    it should be. Adding tr(A)/n to the eigenvalues of A, whose mean is tr(A)/d, makes up for that. With
    tr(G)/n for G the product of what is added is

        tr(A) tr(G) / n²,

    here as a mean over all parameters.
    """
    entries = [len(A) * len(G) for A, G in zip(factors.A, factors.G, strict=True)]
    traces = zip(factors.A, factors.G, strict=True)
    products = [A.trace().double() * G.trace().double() for A, G in traces]
    weights = torch.tensor(entries, dtype=torch.float64) / sum(entries)
    mean = torch.stack(products).cpu() @ weights
    return float(mean) / factors.cases**2


def ema_decay(iteration: int, ceiling: float | None = None, memory: float = 1.0) -> float:
    """ε = min(1 − 1/k, ceiling) [MG15 §5]: a plain average at first, then an exponential one.

    Without a ceiling it is the paper's, or as long a memory as momentum may have where that is longer.
    """
    if ceiling is None:
        ceiling = max(CEILING, 1 - 1 / memory)
    return min(1 - 1 / iteration, ceiling)
