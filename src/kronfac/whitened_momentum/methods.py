"""Which method a parameter gets, what follows from A, and what both cost."""

import math
from dataclasses import dataclass

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


# ------------------------------------------------------------------------------------------ methods


def choose(  # noqa: PLR0911, one for each reason
    p: Tensor, seen: Seen, rows: int, method: str, inputs: InputFactors | None
) -> tuple[int, str]:
    """The method of a parameter, and why.

    Args:
        p: the parameter.
        seen: what forward passes have shown of it.
        rows: the vectors that it is multiplied with in a step.
        method: that of its group.
        inputs: whether there are A's.
    """
    if p.dim() < 2 or not p.numel():
        return ADAM, "not a matrix"
    if method != "auto":
        return METHODS.index(method), "chosen by its group"
    _, m, n = seen.layout.size(p.shape)
    if seen.lookup:
        return ADAM, "an embedding"
    if not rows:
        return ADAM, "no products with it were seen"
    if seen.head:
        return ADAM, "the last layer"
    if min(m, n) < 2:
        return ADAM, "one row or column"
    products = 6 * m * n * rows
    share = polar_cost(m, n) / products
    if share <= POLAR_PAYS:
        return POLAR, f"{share:.2f} of its own products"
    if has_factor(p, seen.layout, inputs) and n / (3 * rows) <= WHITENING_PAYS:
        return WHITENED, f"polar would cost {share:.1f} of its own products"
    return ADAM, f"polar would cost {share:.1f} of its own products, and whitening is no better"


def has_factor(p: Tensor, layout: MatrixLayout, inputs: InputFactors | None) -> bool:
    """Whether there is memory for A and its inverse."""
    b, m, n = layout.size(p.shape)
    return inputs is not None and n <= inputs.widest and layout.groups * n <= WIDE * b * m


def inverted(A: Tensor, method: int) -> Tensor:
    """(A + ε ā I)⁻¹, or (A/ā + ε I)^(−1/2)."""
    mean = A.diagonal().mean()
    if method == POLAR:
        return shifted_inverse(A, POLAR_DAMPING * mean, "A")
    values, vectors = eigh(A / mean, "A")
    return (vectors * (values + WHITENED_DAMPING).rsqrt()) @ vectors.mT


def inverse_cost(p: Tensor, method: int, layout: MatrixLayout) -> int:
    """Operations of one inverse."""
    return (
        (INVERSE_COST if method == POLAR else EIGH_COST)
        * layout.groups
        * layout.size(p.shape)[2] ** 3
    )


def refresh_interval(p: Tensor, cost: float, rows: int, inputs: InputFactors) -> int:
    """Steps from one inverse to the next, from what it costs."""
    steps = cost / (REFRESH_SHARE * 6 * p.numel() * max(rows, 1))
    return inputs.interval * max(2, math.ceil(steps / inputs.interval))


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
    name: str, p: Tensor, seen: Seen, method: int, why: str, inputs: InputFactors | None
) -> ParameterPlan:
    """A row of the plan."""
    b, m, n = seen.layout.size(p.shape) if p.dim() > 1 else (1, 1, p.numel())
    number = precise(p.dtype).itemsize
    added, numbers = 0.0, p.numel() * (2 if method == ADAM else 1)
    if method == POLAR:
        added += b * polar_cost(m, n)
    if method != ADAM and inputs is not None and has_factor(p, seen.layout, inputs):
        sample = min(seen.rows, inputs.rows or seen.rows)
        inverse = inverse_cost(p, method, seen.layout)
        refresh = inverse / refresh_interval(p, inverse, seen.rows, inputs)
        added += 2 * p.numel() * n + 2 * sample * n**2 / inputs.interval + refresh
        numbers += 2 * seen.layout.groups * n**2
    products = 6.0 * p.numel() * seen.rows
    return ParameterPlan(
        name, tuple(p.shape), METHODS[method], why, products, added, numbers * number
    )
