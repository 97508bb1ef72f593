"""Which method a parameter gets, what follows from A, and what both cost."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kronfac.linalg.polar import polar_cost
from kronfac.linalg.spd import eigh, shifted_inverse
from kronfac.model.input_factors import MatrixLayout, Seen, precise

METHODS = ("adam", "polar", "whitened")
"""A state has the place of its method in this list: torch's loading of states takes no text."""
ADAM, POLAR, WHITENED = range(3)
POLAR_DAMPING, WHITENED_DAMPING = 0.2, 0.03
"""Of A, in units of its mean eigenvalue."""
POLAR_PAYS, WHITENING_PAYS = 0.5, 4.0
"""What a method's products may cost, in units of the layer's own forward and backward pass."""
WIDE = 4
"""A is kept for weights with at most so many times as many inputs as outputs, which bounds the state."""
REFRESH_SHARE = 0.1
"""What inverses may cost on average, in units of the layer's own forward and backward pass."""
INVERSE_COST, EIGH_COST = 2, 25
"""Operations of an inverse and an eigendecomposition, in n³, by the time that they take beside products."""


@dataclass(frozen=True)
class InputFactors:
    """How A is estimated."""

    interval: int = 20
    """Steps from one sample of inputs to the next. At first there are more, at steps 0, 1, 2, 4, 8, 16."""
    decay: float = 0.9
    """Of the moving average: min(1 − 1/k, decay) at its k-th update."""
    rows: int | None = 1024
    """Vectors in a sample, for each product; None for all."""
    widest: int = 2048
    """Weights with more inputs have A = I."""

    def due(self, iteration: int) -> bool:
        """Whether inputs are sampled before this step."""
        early = iteration < self.interval and iteration & (iteration - 1) == 0
        return early or iteration % self.interval == 0


class Treatment(NamedTuple):
    """What is done with a parameter: numbers only, which are kept in its state."""

    method: int
    rows: int
    """The vectors that it is multiplied with in a step."""
    transposed: int
    groups: int
    parts: int

    @property
    def layout(self) -> MatrixLayout:
        """How it is read as matrices."""
        return MatrixLayout(*self[2:])

    def has_factor(self, p: Tensor, inputs: InputFactors | None) -> bool:
        """Whether there is an A, and memory for it and its inverse."""
        b, m, n = self.layout.size(p.shape)
        fits = inputs is not None and n <= inputs.widest and self.groups * n <= WIDE * b * m
        return fits and self.method != ADAM

    def inverse_cost(self, p: Tensor) -> int:
        """Operations of one inverse."""
        cost = INVERSE_COST if self.method == POLAR else EIGH_COST
        return cost * self.groups * self.layout.size(p.shape)[2] ** 3

    def refresh_interval(self, p: Tensor, inputs: InputFactors) -> int:
        """Steps from one inverse to the next, from what it costs."""
        steps = self.inverse_cost(p) / (REFRESH_SHARE * 6 * p.numel() * max(self.rows, 1))
        return inputs.interval * max(2, math.ceil(steps / inputs.interval))

    def inverted(self, A: Tensor) -> Tensor:
        """(A + ε ā I)⁻¹, or (A/ā + ε I)^(−1/2), for every A (groups, n, n)."""
        return torch.stack([self._inverted(each) for each in A])

    def _inverted(self, A: Tensor) -> Tensor:
        mean = A.diagonal().mean()
        if self.method == POLAR:
            return shifted_inverse(A, POLAR_DAMPING * mean, "A")
        values, vectors = eigh(A / mean, "A")
        return (vectors * (values + WHITENED_DAMPING).rsqrt()) @ vectors.mT


def choose(
    p: Tensor, seen: Seen, method: str, inputs: InputFactors | None
) -> tuple[Treatment, str]:
    """What is done with a parameter, and why.

    Args:
        p: the parameter.
        seen: what forward passes have shown of it.
        method: that of its group.
        inputs: whether there are A's.
    """

    def treated(method: int) -> Treatment:
        return Treatment(method, seen.rows, *seen.layout)

    if p.dim() < 2 or not p.numel():
        return treated(ADAM), "not a matrix"
    _, m, n = seen.layout.size(p.shape)
    reasons = {
        "an embedding": seen.lookup,
        "no products with it were seen": not seen.rows,
        "the last layer": seen.head,
        "one row or column": min(m, n) < 2,
    }
    if method != "auto":
        return treated(METHODS.index(method)), "chosen by its group"
    for reason, holds in reasons.items():
        if holds:
            return treated(ADAM), reason
    share = polar_cost(m, n) / (6 * m * n * seen.rows)
    if share <= POLAR_PAYS:
        return treated(POLAR), f"{share:.2f} of its own products"
    why = f"polar would cost {share:.1f} of its own products"
    if treated(WHITENED).has_factor(p, inputs) and n / (3 * seen.rows) <= WHITENING_PAYS:
        return treated(WHITENED), why
    return treated(ADAM), f"{why}, and whitening is no better"


# --------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True)
class ParameterPlan:
    """What one parameter gets."""

    name: str
    shape: tuple[int, ...]
    method: str
    why: str
    products: float
    """Operations of its products with inputs, forward and backward."""
    added: float
    """Operations that its method adds to a step, inverses and samples included."""
    bytes: int
    """Of its state."""


@dataclass(frozen=True)
class EverydayPlan:
    """What all parameters get, and what it costs."""

    rows: list[ParameterPlan]
    cost: float
    """Operations of a step in units of AdamW's, as far as they are products with weights."""
    state: float
    """Bytes of the state, in units of the parameters' own."""

    def __str__(self) -> str:
        lines = [f"{'parameter':40} {'shape':>16} {'method':9} {'added':>6} {'bytes':>12}  why"]
        for r in self.rows:
            shape, share = "×".join(map(str, r.shape)), r.added / max(r.products, 1.0)
            lines.append(
                f"{r.name:40} {shape:>16} {r.method:9} {share:6.2f} {r.bytes:12,}  {r.why}"
            )
        summary = (
            f"Cost of a step: {self.cost:.2f} × AdamW's. State: {self.state:.1f} × the parameters."
        )
        return "\n".join([*lines, summary])


def planned(
    name: str, p: Tensor, treatment: Treatment, why: str, inputs: InputFactors | None
) -> ParameterPlan:
    """A row of the plan."""
    b, m, n = treatment.layout.size(p.shape) if p.dim() > 1 else (1, 1, p.numel())
    method, rows = treatment.method, treatment.rows
    added, numbers = 0.0, p.numel() * (2 if method == ADAM else 1)
    if method == POLAR:
        added += b * polar_cost(m, n)
    if inputs is not None and treatment.has_factor(p, inputs):
        sample = min(rows, inputs.rows or rows)
        refresh = treatment.inverse_cost(p) / treatment.refresh_interval(p, inputs)
        added += 2 * p.numel() * n + 2 * sample * n**2 / inputs.interval + refresh
        numbers += 2 * treatment.groups * n**2
    size = numbers * precise(p.dtype).itemsize
    return ParameterPlan(
        name, tuple(p.shape), METHODS[method], why, 6.0 * p.numel() * rows, added, size
    )
