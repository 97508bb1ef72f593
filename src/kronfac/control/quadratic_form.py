"""Sums with the few numbers that M has along a few directions.

All of it is Python's numbers, float64 whatever the dtype of the tensors that they came from: for so few a
tensor takes longer to make than the sums with it.
"""

from collections.abc import Sequence

Coefficients = Sequence[float]
Matrix = Sequence[Sequence[float]]


def inner(u: Coefficients, v: Coefficients) -> float:
    """uᵀv."""
    return sum(x * y for x, y in zip(u, v, strict=True))


def quadratic_form(Q: Matrix, c: Coefficients) -> float:
    """cᵀQc."""
    return inner(c, [inner(row, c) for row in Q])


def model_change(Q: Matrix, r: Coefficients, c: Coefficients) -> float:
    """½ cᵀQc + rᵀc."""
    return inner([inner(row, c) / 2 + r_i for row, r_i in zip(Q, r, strict=True)], c)
