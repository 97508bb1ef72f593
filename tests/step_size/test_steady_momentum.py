"""The steadier (α, μ): by definition the nearest μ that leaves half of what M predicts, with its best α."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kronfac import QuadraticModel
from kronfac.step_size.quadratic_model import model_change
from kronfac.step_size.steady_momentum import least_momentum, steadied

EPS = 1e-16
GRID = 1e-4


def problem(seed: int) -> tuple[list[list[float]], list[float]]:
    generator = torch.Generator().manual_seed(seed)
    V = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    r = torch.randn(2, generator=generator, dtype=torch.float64)
    return (V.mT @ V).tolist(), r.tolist()


def best_change(Q: list[list[float]], r: list[float], mu: float) -> tuple[float, float]:
    """The lowest M for this μ, and its α, by going through α."""
    alphas = torch.arange(-60, 60, GRID, dtype=torch.float64)
    (a, b), (_, d) = Q
    M = alphas**2 * a / 2 + alphas * (mu * b + r[0]) + mu**2 * d / 2 + mu * r[1]
    at = int(M.argmin())
    return float(M[at]), float(alphas[at])


@pytest.mark.parametrize("least", [0.2, 0.5, 0.9])
@pytest.mark.parametrize("seed", range(12))
def test_the_nearest_mu_that_leaves_half_with_its_best_alpha(seed, least):
    Q, r = problem(seed)
    free = QuadraticModel().solve(Q, r, EPS)
    alpha, mu = steadied(Q, r, free.coefficients, least)
    change, best_alpha = best_change(Q, r, mu)
    assert alpha == pytest.approx(best_alpha, abs=2 * GRID)
    allowed = free.predicted_change / 2
    assert change <= allowed + Q[0][0] * GRID**2, "but for the grid's own error"
    wanted = min(max(free.coefficients[1], least), 1.0)
    if mu != pytest.approx(wanted):  # then a little nearer would have been too far
        nearer = mu + 1e-3 * (wanted - mu)
        assert best_change(Q, r, nearer)[0] > allowed
        assert (mu - free.coefficients[1]) * (wanted - mu) > 0, "on the way there"


@given(confirmed=st.floats(-1, 1))
def test_the_less_is_confirmed_the_steadier(confirmed):
    least = least_momentum(0.5, confirmed)
    assert least == pytest.approx(0.5 * min(1, max(0, 1 - confirmed / 0.5)))


def test_what_is_confirmed_is_left_alone():
    Q, r = problem(3)
    free = QuadraticModel().solve(Q, r, EPS)
    rule = QuadraticModel(steady=0.5)
    assert rule.solve(Q, r, EPS) == free
    assert rule.solve(Q, r, EPS, confirmed=0.6) == free
    assert QuadraticModel().solve(Q, r, EPS, confirmed=-1.0) == free
    alone = QuadraticModel(momentum=False)
    steady = QuadraticModel(momentum=False, steady=0.5)
    assert steady.solve([[2.0]], [-1.0], EPS, -1.0) == alone.solve([[2.0]], [-1.0], EPS)


def test_the_model_s_change_and_slope_are_those_of_the_steadier_step():
    for seed in range(12):
        Q, r = problem(seed)
        step = QuadraticModel(steady=0.5).solve(Q, r, EPS, confirmed=0.0)
        assert step.predicted_change == pytest.approx(model_change(Q, r, step.coefficients))
        assert step.slope == pytest.approx(
            sum(x * c for x, c in zip(r, step.coefficients, strict=True))
        )


def test_a_previous_step_without_curvature_takes_no_part():
    Q, r = [[2.0, 0.0], [0.0, 0.0]], [-1.0, 0.0]
    alpha, mu = QuadraticModel(steady=0.5).solve(Q, r, EPS, -1.0).coefficients
    assert alpha == pytest.approx(0.5)
    assert mu == 0
