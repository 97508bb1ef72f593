"""Floating-point operations of SGD and of K-FAC by part, counted from the shapes [MG15 §8].

A multiplication and an addition are two. Counted are matrix products and decompositions; everything
else goes once through memory and has one power of d less. The closure is `KFAC.closure` in one chunk,
whose activations K-FAC's own passes reuse.

    Cholesky ⅓n³, inverse from it ⅔n³, triangular solve n²k [Golub and Van Loan 2013]
    eigh 6n³: tridiagonal form 4/3, divide and conquer without deflation 8/3, back 2 [LAPACK's syevd]
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from kronfac_experiments.bench.schedule import Schedule

EIGH = 6
CHOLESKY_INVERSE = 1

Shape = tuple[int, int]
"""Shape of a layer's matrix [W b]: (out, in + 1)."""


def shapes_of(widths: Sequence[int]) -> list[Shape]:
    """Shapes of the layers between these widths, with biases."""
    return [(outputs, inputs + 1) for inputs, outputs in pairwise(widths)]


def product(rows: int, inner: int, columns: int) -> int:
    """(rows, inner) times (inner, columns)."""
    return 2 * rows * inner * columns


def sgd(shapes: Sequence[Shape], cases: int) -> float:
    """Forward, backward, gradients of the weights."""
    return 2 * _pass(shapes, cases) + _backward(shapes, cases)


def kfac(
    shapes: Sequence[Shape], cases: int, schedule: Schedule, tridiagonal: bool
) -> dict[str, float]:
    """An average step, by the parts that `StepReport.seconds` has."""
    once = {
        "gradient": sgd(shapes, cases),
        "statistics": statistics(shapes, _share(schedule.tau1, cases), tridiagonal),
        "inverse": refresh(shapes, tridiagonal),
        "direction": direction(shapes, tridiagonal),
        "fisher_products": fisher_products(
            shapes, _share(schedule.tau2, cases), schedule.directions
        ),
        "reduction_ratio": _pass(shapes, cases),
    }
    return {part: count * schedule.times[part] for part, count in once.items()}


def statistics(shapes: Sequence[Shape], cases: int, tridiagonal: bool) -> float:
    """A backward pass from sampled targets, Ā and G, with those of neighbours."""
    pairs = [*zip(shapes, shapes, strict=True), *(pairwise(shapes) if tridiagonal else [])]
    moments = sum(
        product(out, cases, other_out) + product(inputs, cases, other_inputs)
        for (out, inputs), (other_out, other_inputs) in pairs
    )
    return _backward(shapes, cases) + moments


def fisher_products(shapes: Sequence[Shape], cases: int, directions: int) -> float:
    """J v of all directions forward: V ā in every layer, W ȧ in all but the first; then (Jv)ᵀF_R Jv."""
    tangents = _pass(shapes, cases) + _backward(shapes, cases)
    return directions * tangents + product(directions, cases * shapes[-1][0], directions)


def direction(shapes: Sequence[Shape], tridiagonal: bool) -> float:
    """The inverse times the gradient."""
    total = sum(product(out, out, ins) + product(out, ins, ins) for out, ins in shapes)
    if not tridiagonal:
        return total
    for (out, ins), (next_out, next_ins) in pairwise(shapes):
        r2, r1 = min(out, next_out), min(ins, next_ins)  # at most: small ones are dropped
        total += product(r2, out, ins) + product(r2, ins, r1)
        total += product(out, r2, r1) + product(out, r1, ins)
        total += _triple(out, next_out, next_ins, ins) + _triple(next_out, out, ins, next_ins)
    return total


def refresh(shapes: Sequence[Shape], tridiagonal: bool) -> float:
    """The inverse for one γ."""
    total: float = sum(CHOLESKY_INVERSE * (out**3 + ins**3) for out, ins in shapes)
    if tridiagonal:
        for one, other in pairwise(shapes):
            total += sum(_conditional(n, k) for n, k in zip(one, other, strict=True))
    return total


def exact_tikhonov(shapes: Sequence[Shape]) -> float:
    """The eigendecompositions that all γ share."""
    return sum(EIGH * (out**3 + ins**3) for out, ins in shapes)


def _conditional(n: int, k: int) -> float:
    """One side of Ψ and Σ⁻¹: a factor n × n, the next layer's k × k, correlated by n × k."""
    r = min(n, k)
    regress = 2 * k**2 * n
    gram = product(r, max(n, k), r)
    back = product(n, k, r) if k < n else 0
    return regress + n**2 * k + gram + EIGH * r**3 + back + n**2 * r


def _share(fraction: float, cases: int) -> int:
    """As `Batch.first` has it."""
    return math.ceil(fraction * cases - 1e-9)


def _pass(shapes: Sequence[Shape], cases: int) -> float:
    """One product with every weight: forward, or the gradients of the weights."""
    return sum(product(cases, inputs - 1, out) for out, inputs in shapes)


def _backward(shapes: Sequence[Shape], cases: int) -> float:
    """To the inputs of all layers but the first."""
    return _pass(shapes[1:], cases)


def _triple(a: int, b: int, c: int, d: int) -> int:
    """(a, b) (b, c) (c, d) in the cheaper order."""
    return min(product(a, b, c) + product(a, c, d), product(b, c, d) + product(a, b, d))
