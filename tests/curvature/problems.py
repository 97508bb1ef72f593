"""Small networks with their dense moments."""

import functools

from kronfac.curvature import Curvature, KroneckerMoments, Link
from tests.conftest import mlp, normal
from tests.reference import dense


@functools.cache
def network(name: str):
    """A network with its dense moments: Ā_ij and G_ij for all i, j, and its layers' shapes."""
    widths, activation, bias, cases, likelihood = {
        "deep": ([3, 4, 3, 3, 2], "tanh", True, 20, "categorical"),
        "no_bias": ([3, 4, 3, 2], "sigmoid", False, 20, "bernoulli"),
        "few_cases": ([4, 5, 4, 2], "tanh", True, 2, "gaussian"),  # every factor rank-deficient
        "two_layers": ([3, 5, 2], "relu", True, 20, "gaussian"),
        "one_layer": ([4, 3], "tanh", True, 20, "categorical"),
    }[name]
    model = mlp(widths, activation, bias)
    A, G = dense.moments(model, normal(cases, widths[0]), likelihood)
    return A, G, dense.shapes(model)


def curvature_from(A, G) -> Curvature:
    """The blocks on the diagonals of the dense moments, and the links next to them."""
    return Curvature(
        blocks=tuple(KroneckerMoments(A[i][i], G[i][i]) for i in range(len(A))),
        links=tuple(Link(A[i][i + 1], G[i][i + 1]) for i in range(len(A) - 1)),
    )
