"""What every inverse must satisfy. A new one's test is only how to build it and its dense truth:

CASES = [Case("mine", build=lambda: Mine(…).mv, matrix=lambda: dense_damped_fisher, shapes=[…])]

@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_conformance(case, check):
    check(case)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.testing import assert_close

from tests.conftest import normal
from tests.reference import dense

Matrices = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """An inverse as an action on one matrix a layer, with the dense matrix that it inverts."""

    name: str
    build: Callable[[], Callable[[Matrices], Sequence[Tensor]]]
    """Returns the function `mv`."""
    matrix: Callable[[], Tensor]
    """What it is the inverse of, on vectors [vec(V₁); vec(V₂); …]."""
    shapes: Sequence[tuple[int, int]]

    def __str__(self) -> str:
        return self.name


def single(name: str, build: Callable[[], Callable], matrix: Callable[[], Tensor], shape) -> Case:
    """A case for an inverse that acts on one matrix alone."""

    def on_tuples() -> Callable[[Matrices], Sequence[Tensor]]:
        mv = build()
        return lambda V: (mv(V[0]),)

    return Case(name, on_tuples, matrix, [shape])


def as_matrix(mv: Callable[[Matrices], Sequence[Tensor]], shapes) -> Tensor:
    """The dense matrix of a linear action, column by column."""
    size = sum(rows * columns for rows, columns in shapes)
    basis = torch.eye(size, dtype=torch.float64)
    return torch.stack([dense.flatten(mv(dense.unflatten(e, shapes))) for e in basis], dim=1)


def assert_relative(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Every entry to within `tolerance` of the largest one."""
    assert_close(actual, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def solves(case: Case) -> None:
    """mv(v) is the solution u of matrix · u = v."""
    mv = case.build()
    matrix = case.matrix()
    for seed in range(3):
        v = normal(len(matrix), seed=seed)
        actual = dense.flatten(mv(dense.unflatten(v, case.shapes)))
        assert_relative(actual, torch.linalg.solve(matrix, v))


def is_symmetric(case: Case) -> None:
    """Its matrix is its transpose."""
    inverse = as_matrix(case.build(), case.shapes)
    assert_relative(inverse, inverse.mT)


def is_positive_definite(case: Case) -> None:
    """Its smallest eigenvalue is one over the matrix's largest, and so positive."""
    inverse = as_matrix(case.build(), case.shapes)
    smallest = torch.linalg.eigvalsh((inverse + inverse.mT) / 2)[0]
    largest = torch.linalg.eigvalsh(case.matrix())[-1]
    assert_close(smallest, 1 / largest, rtol=1e-8, atol=0)
    assert smallest > 0


def is_linear(case: Case) -> None:
    """mv(a u + b v) = a mv(u) + b mv(v)."""
    mv = case.build()
    size = sum(rows * columns for rows, columns in case.shapes)
    u, v = normal(size, seed=1), normal(size, seed=2)

    def product(w: Tensor) -> Tensor:
        return dense.flatten(mv(dense.unflatten(w, case.shapes)))

    assert_relative(product(2.5 * u - 0.3 * v), 2.5 * product(u) - 0.3 * product(v))


CHECKS = [solves, is_symmetric, is_positive_definite, is_linear]
