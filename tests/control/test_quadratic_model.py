"""(α, μ) against the minimiser of the dense quadratic model over the span of the directions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from kronfac.control import (
    Measurement,
    QuadraticModel,
    RawStep,
    Step,
    StepState,
)
from kronfac.control.base import model_change
from kronfac.control.step_rule import clip_to_objective
from tests.conftest import ALGEBRA, AUTODIFF, normal, spd
from tests.reference import dense

SIZE = 8
H = spd(SIZE)  # F + (λ + η) I
GRADIENT = normal(SIZE, seed=1)
EPS = torch.finfo(torch.float64).eps


def reduced(directions):
    """Q and r."""
    V = torch.stack(directions, dim=1)
    return V.mT @ H @ V, V.mT @ GRADIENT


def solved(rule, Q, r, precision):
    """The step from Q and r, as the optimizer hands them over."""
    return rule.solve(Q.tolist(), r.tolist(), StepState(), Measurement(precision=precision))


def solve(directions, precision=EPS):
    step = solved(QuadraticModel(), *reduced(directions), precision)
    delta = sum(c * v for c, v in zip(step.coefficients, directions, strict=True))
    return step, delta


@pytest.mark.parametrize("count", [1, 2])
def test_it_is_the_minimiser_over_the_span(count):
    directions = [normal(SIZE, seed=10 + i) * 10.0**i for i in range(count)]
    step, delta = solve(directions)
    expected = dense.minimise_over_span(H, GRADIENT, directions)
    assert_close(delta, expected, **AUTODIFF)
    change = dense.quadratic_change(H, GRADIENT, expected)
    assert step.predicted_change == pytest.approx(float(change), rel=1e-10)


def test_one_direction_is_the_formula_of_the_paper():
    """α = −∇hᵀΔ / Δᵀ(F + (λ + η)I)Δ and M(αΔ) − M(0) = ½ ∇hᵀδ [MG15 §6.4, §6.5]."""
    Delta = normal(SIZE, seed=2)
    step, delta = solve([Delta])
    alpha = -(GRADIENT @ Delta) / (Delta @ H @ Delta)
    assert step.coefficients == pytest.approx((float(alpha),), rel=1e-12)
    assert step.predicted_change == pytest.approx(float(GRADIENT @ delta / 2), rel=1e-12)


@pytest.mark.parametrize("precision", [EPS, torch.finfo(torch.float32).eps])
@pytest.mark.parametrize("scale", [1.0, -3.0, 1e-6, 1e6])
def test_a_previous_update_that_is_parallel_to_the_proposal(precision, scale):
    """δ₀ ∝ Δ: Q has rank one, and the step is the best along the one line."""
    Delta = normal(SIZE, seed=2)
    step, delta = solve([Delta, scale * Delta], precision)
    expected = dense.minimise_over_span(H, GRADIENT, [Delta])
    assert_close(delta, expected, **AUTODIFF)
    assert all(math.isfinite(c) for c in step.coefficients)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_zero_direction_takes_no_part(zero):
    """δ₀ = 0 before the first update, Δ = 0 at a stationary point."""
    directions = [normal(SIZE, seed=2), normal(SIZE, seed=3)]
    directions[zero] = torch.zeros(SIZE).double()
    step, delta = solve(directions)
    assert step.coefficients[zero] == 0
    expected = dense.minimise_over_span(H, GRADIENT, [directions[1 - zero]])
    assert_close(delta, expected, **ALGEBRA)


def test_no_direction_at_all():
    zero = torch.zeros(SIZE).double()
    step, _ = solve([zero, zero])
    assert step.coefficients == (0, 0)
    assert step.predicted_change == 0


def test_float32_noise_in_nearly_parallel_directions_is_not_amplified():
    """δ₀ = Δ to float32: what distinguishes them is rounding, and no step may be built on it."""
    Delta = normal(SIZE, seed=2)
    previous = Delta * (1 + 1e-7 * normal(SIZE, seed=3))
    Q, r = reduced([Delta, previous])
    noise = 1e-7 * normal(2, 2, seed=4)
    noisy = Q * (1 + (noise + noise.mT) / 2)
    step = solved(QuadraticModel(), noisy, r, torch.finfo(torch.float32).eps)
    delta = step.coefficients[0] * Delta + step.coefficients[1] * previous
    expected = dense.minimise_over_span(H, GRADIENT, [Delta])
    assert_close(delta, expected, rtol=1e-5, atol=1e-6)


# -------------------------------------------------------------------------------------- properties

numbers = st.floats(-1e3, 1e3)
scales = st.floats(-12, 12)


@st.composite
def systems(draw):
    """Gram matrices of rank 0 to k, with the rounding noise of a dtype, and right-hand sides."""
    k = draw(st.integers(1, 2))
    rank = draw(st.integers(0, k))
    X = torch.tensor([draw(numbers) for _ in range(k * rank)], dtype=torch.float64)
    X = X.reshape(rank, k) * torch.tensor([10.0 ** draw(scales) for _ in range(k)]).double()
    precision = draw(st.sampled_from([EPS, torch.finfo(torch.float32).eps]))
    noise = torch.tensor([draw(st.floats(-1, 1)) for _ in range(k * k)]).double().reshape(k, k)
    Q = X.mT @ X
    size = Q.diagonal().sqrt()
    Q = Q + precision * torch.outer(size, size) * (noise + noise.mT) / 2
    gradient = torch.tensor([draw(numbers) for _ in range(rank)], dtype=torch.float64)
    return Q, X.mT @ gradient, precision


@settings(max_examples=300)
@given(systems())
def test_a_step_is_never_predicted_to_increase_the_objective(system):
    Q, r, precision = system
    step = solved(QuadraticModel(), Q, r, precision)
    assert all(math.isfinite(c) for c in step.coefficients)
    assert step.predicted_change <= 0


@given(systems(), st.lists(scales, min_size=3, max_size=3))
def test_the_step_does_not_depend_on_the_length_of_the_directions(system, logs):
    Q, r, precision = system
    s = 2.0 ** torch.tensor(logs[: len(r)]).double().round()  # exact in floating point
    plain = solved(QuadraticModel(), Q, r, precision)
    scaled = solved(QuadraticModel(), s[:, None] * Q * s, s * r, precision)
    assert scaled.predicted_change == pytest.approx(plain.predicted_change, rel=1e-6, abs=1e-300)


# ------------------------------------------------------------------------------------------ others


@pytest.mark.parametrize("alpha", [1.0, 0.1])
def test_raw_step_keeps_the_proposal(alpha):
    Delta = normal(SIZE, seed=2)
    step = solved(RawStep(alpha), *reduced([Delta]), EPS)
    assert step.coefficients == (alpha,)
    expected = dense.quadratic_change(H, GRADIENT, alpha * Delta)
    assert step.predicted_change == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("objective", [0.3, 1.0, 2.4])
def test_a_step_that_promises_more_than_there_is_is_cut_where_the_model_is_zero(objective):
    Q, r = [[2.0, 0.3], [0.3, 1.0]], [-3.0, 0.5]
    step = QuadraticModel().solve(Q, r, StepState(), Measurement(precision=1e-16))
    assert step.predicted_change < -2.4
    cut, share = clip_to_objective(step, objective)
    assert cut.predicted_change == -objective
    assert model_change(Q, r, cut.coefficients) == pytest.approx(-objective, rel=1e-12)
    # The nearer one of the two points on the ray where M is 0, in the same direction.
    shares = {c / full for c, full in zip(cut.coefficients, step.coefficients, strict=True)}
    assert max(shares) == pytest.approx(min(shares))
    assert 0 < max(shares) < 1
    assert share == pytest.approx(max(shares))


@pytest.mark.parametrize("objective", [0.02, 0.3, 0.6])
@pytest.mark.parametrize("length", [0.3, 0.9, 1.4])
def test_so_is_a_step_that_is_no_minimiser(objective, length):
    Q, r = [[2.0, 0.3], [0.3, 1.0]], [-3.0, 0.5]
    c = tuple(length * x for x in (1.0, 0.4))
    step = Step(c, model_change(Q, r, c), slope=-3.0 * c[0] + 0.5 * c[1])
    assert step.predicted_change < -0.6
    cut, share = clip_to_objective(step, objective)
    assert 0 < share < 1
    assert model_change(Q, r, cut.coefficients) == pytest.approx(-objective, rel=1e-12)
    assert all(model_change(Q, r, [t * share * x for x in c]) > -objective for t in (0.3, 0.9))


def test_below_what_the_loss_resolves_there_is_nothing_to_gain():
    step = Step((1.0, 0.5), -0.7)
    cut, share = clip_to_objective(step, 0.5, least=0.2)
    assert cut.predicted_change == pytest.approx(-0.3)
    assert 0 < share < 1
    assert clip_to_objective(step, 0.2, least=0.2) == (Step((0.0, 0.0), 0.0, 0.0), 0.0)
    assert clip_to_objective(step, 0.0, least=0.2) == (Step((0.0, 0.0), 0.0, 0.0), 0.0)
    assert clip_to_objective(step, 1.0, least=0.2) == (step, 1.0)


def test_a_step_whose_square_overflows_is_cut_too():
    cut, share = clip_to_objective(Step((1.0,), -7e160, None), 7e29)
    assert share == pytest.approx(7e29 / 1.4e161, rel=1e-12)
    assert cut.predicted_change == -7e29


def test_a_step_that_promises_less_is_left_as_it_is():
    step = Step((1.0, 0.5), -0.7)
    assert clip_to_objective(step, 0.7) == (step, 1.0)
    assert clip_to_objective(step, 5.0) == (step, 1.0)
    assert clip_to_objective(step, -1.0) == (step, 1.0), "such an objective is no sum of losses"
