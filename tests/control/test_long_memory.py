"""The step with a long memory: by definition, and what it does where gradients have noise."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kronfac import ConjugateGradients, QuadraticModel
from kronfac.control import LongMemory, Measurement, MemoryState, StepState
from kronfac.control.base import model_change

EPS = 1e-16
FREE = QuadraticModel(bounded=False, memory=None)
RULE = QuadraticModel(memory=LongMemory())


At = tuple[MemoryState, Measurement]


def at(iteration: int, confirmed: float = -1.0, memory: float = math.inf) -> At:
    m = Measurement(iteration=iteration, confirmed=confirmed, loss=1.0, precision=EPS)
    return MemoryState(memory), m


def solve(rule, Q, r, where: At | None = None):
    memory, m = where or (MemoryState(), Measurement(precision=EPS))
    return rule.solve(Q, r, StepState(memory=memory), m)


def noise(confirmed: float) -> float:
    return LongMemory().noise(at(1, confirmed)[1])


def compared(where: At, better: bool, rule: LongMemory | None = None) -> float:
    return (rule or LongMemory()).compare(*where, -1.0 if better else 1.0).length


def compares(k: int, start: int) -> bool:
    average = MemoryState(average=(), start=start)
    return LongMemory().compares(average, Measurement(iteration=k, confirmed=0.0))


def problem(seed: int) -> tuple[list[list[float]], list[float]]:
    generator = torch.Generator().manual_seed(seed)
    V = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    r = torch.randn(2, generator=generator, dtype=torch.float64)
    return (V.mT @ V).tolist(), r.tolist()


@pytest.mark.parametrize("seed", range(6))
def test_where_all_is_noise_a_part_of_the_best_step_alone_and_all_of_the_memory(seed):
    Q, r = problem(seed)
    # Where the memory is short and conjugate to Δ, M allows the whole way.
    Q, r = [[Q[0][0], 0.0], [0.0, Q[1][1] / 1e6]], [r[0], -Q[1][1] / 1e6]
    (alone,) = solve(
        QuadraticModel(momentum=False, bounded=False, memory=None), [Q[0][:1]], r[:1]
    ).coefficients
    step = solve(RULE, Q, r, at(200, 0.1))
    assert step.coefficients == pytest.approx((0.5 * alone, 1 - 1 / 30))
    assert step.remembered == pytest.approx(0.3)


@pytest.mark.parametrize("confirmed", [-1.0, 0.1, 0.3, 0.45])
@pytest.mark.parametrize("seed", range(12))
def test_as_far_towards_it_as_noise_says_and_u_costs_a_third_at_most(seed, confirmed):
    Q, r = problem(seed)
    free = solve(FREE, Q, r)
    step = solve(RULE, Q, r, at(100, confirmed))
    alpha = -0.5 * r[0] / Q[0][0]
    gain = -model_change(Q, r, (alpha, 0.0))
    grid = torch.linspace(0, 1 - 1 / 15, 4_001, dtype=torch.float64).tolist()
    mu = max(mu for mu in grid if model_change(Q, r, (alpha, mu)) <= -2 / 3 * gain + 1e-12)
    far = noise(confirmed)
    whole = (alpha, mu)
    expected = [a + far * (b - a) for a, b in zip(free.coefficients, whole, strict=True)]
    assert step.coefficients == pytest.approx(expected, abs=3e-4)
    assert step.remembered == pytest.approx(1 - 0.7 * far)
    assert step.predicted_change == pytest.approx(model_change(Q, r, step.coefficients))
    assert step.slope == pytest.approx(
        sum(x * c for x, c in zip(r, step.coefficients, strict=True))
    )


def test_a_mini_batch_that_would_undo_the_memory_many_times_over_leaves_it():
    # Of an MNIST run: M is lowest at μ = −7.9, and half as low as that as soon as μ = 0.06.
    Q, r = [[883.6427, -0.81229], [-0.81229, 0.00332]], [-16.7157, 0.0356]
    assert solve(FREE, Q, r).coefficients[1] < -7
    assert solve(RULE, Q, r, at(400)).coefficients[1] == pytest.approx(1 - 1 / 60)


@given(confirmed=st.floats(-1, 1))
def test_noise_falls_from_a_quarter_confirmed_to_a_half(confirmed):
    assert noise(confirmed) == pytest.approx(min(max(2 - 4 * confirmed, 0), 1))


@given(iteration=st.integers(1, 10**6))
def test_the_memory_grows_with_the_iterations(iteration):
    expected = min(max(0.15 * iteration, 1), 100)
    assert LongMemory().horizon(*at(iteration)) == pytest.approx(expected)


@pytest.mark.parametrize(("confirmed", "steps"), [(-1.0, 30), (0.25, 30), (0.375, 15.5), (0.5, 1)])
def test_the_more_noise_the_longer_statistics_are_remembered(confirmed, steps):
    assert LongMemory().statistics(at(200, confirmed)[1]) == pytest.approx(steps)


def test_what_is_confirmed_is_left_alone():
    Q, r = problem(3)
    free = solve(FREE, Q, r)
    assert solve(RULE, Q, r) == free
    assert solve(RULE, Q, r, at(1000, 0.5)) == free
    assert solve(FREE, Q, r, at(1000)) == free
    without = QuadraticModel(momentum=False, bounded=False, memory=None)
    with_memory = replace(without, memory=LongMemory())
    assert solve(with_memory, [[2.0]], [-1.0], at(50)) == solve(without, [[2.0]], [-1.0])


@pytest.mark.parametrize("iteration", [20, 100, 400, 10_000])
def test_the_memory_is_shorter_where_the_average_is_better_and_longer_where_not(iteration):
    # By e in as many iterations as θ̄ is an average over, a fifth of all, with comparisons every 20.
    factor = min(math.exp(20 / (0.2 * iteration)), 1.5)
    experience = at(iteration, memory=2.0)
    assert compared(experience, better=True) == pytest.approx(2 / factor)
    assert compared(experience, better=False) == pytest.approx(2 * factor)
    # From what is in use, which is no more than a share of the iterations.
    ceiling = min(0.15 * iteration, 100)
    free = at(iteration)
    assert compared(free, better=True) == pytest.approx(ceiling / factor)
    # Where that is all it may be, it goes on being that.
    assert compared(free, better=False) == math.inf


def test_it_does_not_end_at_nothing():
    memory = 1.0
    for k in range(20, 4_000, 20):
        memory = compared(at(k, memory=memory), better=True)
    assert memory == 0.01


@pytest.mark.parametrize("memory", [0.02, 0.3, 1.0, 3.0])
def test_less_than_one_step_remembered_is_less_of_it_taken(memory):
    Q, r = [[2.0, 0.0], [0.0, 1e-9]], [-1.0, -1e-9]
    step = solve(RULE, Q, r, at(200, memory=memory))
    alpha, mu = step.coefficients
    assert alpha == pytest.approx(0.25 * min(memory, 1))
    assert mu == pytest.approx(1 - 1 / max(memory, 1))


def test_an_average_over_next_to_nothing_is_no_overflow():
    assert compared(at(20, memory=3.0), True, LongMemory(averaged=1e-300)) == pytest.approx(2.0)


@given(start=st.integers(0, 4_000), length=st.integers(1, 800))
@example(start=4_000, length=100)  # not yet a fifth
@example(start=100, length=800)  # long more than a fifth
@example(start=3, length=2)
@example(start=0, length=1)
def test_the_average_is_over_a_fifth_of_the_iterations_once_there_are_as_many(start, length):
    """The average of numbers that are their own iteration, so that it shows how long ago they were."""
    rule, start = LongMemory(), 5 * start
    values = [5.0 * j for j in range(start // 5, start // 5 + length)]
    average = values[0]
    for k in values[1:]:
        average += rule.weight(int(k), start) * (k - average)
    k = int(values[-1])
    if k - start + 5 <= 0.2 * k:
        assert average == pytest.approx(sum(values) / length)
        assert not compares(k, start)
    elif k > 0:
        # Of an exponential average over n: n ago, in the end; of a plain one half of that.
        assert 0.05 * k < k - average + 5 < 0.2 * k + 5
    else:
        assert average == 0
    assert rule.averages(at(k)[1])
    assert not rule.averages(at(k + 1)[1])


@pytest.mark.parametrize(("start", "first"), [(5, 20), (40, 60), (1_000, 1_260)])
def test_it_is_compared_when_it_is_that_long(start, first):
    compared = [k for k in range(start, 2_000) if compares(k, start)]
    assert compared == list(range(first, 2_000, 20))


def test_without_a_memory_yet_it_is_half_the_best_step():
    step = solve(RULE, [[2.0]], [-1.0], at(50))
    assert step.coefficients == pytest.approx((0.25,))
    assert step.remembered == pytest.approx(0.3)


def test_directions_without_curvature():
    step = solve(RULE, [[0.0, 0.0], [0.0, 2.0]], [0.0, -1.0], at(50))
    assert step.coefficients == pytest.approx((0.0, 0.5))
    assert step.remembered == 1
    alpha, mu = solve(RULE, [[2.0, 0.0], [0.0, 0.0]], [-1.0, 0.0], at(50)).coefficients
    assert alpha == pytest.approx(0.25)
    assert mu == 0


def test_conjugate_gradients_start_from_the_minimiser():
    Q, r = problem(3)
    rule = ConjugateGradients(memory=LongMemory(), cg_steps=2)
    assert solve(rule, Q, r, at(50)) == solve(FREE, Q, r)
    assert rule.long_memory is None
    once = ConjugateGradients(memory=LongMemory(), cg_steps=1)
    assert solve(once, Q, r, at(50)) == solve(RULE, Q, r, at(50))
    assert once.long_memory == RULE.long_memory == LongMemory()


def excess(
    curvature: torch.Tensor,
    memory: LongMemory | None,
    steps: int,
    scale: float = 0.3,
    compare: bool = False,
) -> float:
    """The value of Σ ½ h x² after steps of either kind whose gradients have noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.ones_like(curvature)
    remembered = MemoryState(average=(x,), start=0)
    u: torch.Tensor | None = None
    tail = []

    def objective(x: torch.Tensor) -> float:
        return float((curvature * x**2).sum() / 2)

    for k in range(1, steps + 1):
        if compare and memory is not None:
            m = at(k, 0.0)[1]
            if memory.compares(remembered, m):
                (average,) = remembered.average
                remembered = memory.compare(remembered, m, objective(average) - objective(x))
            if memory.averages(m):
                remembered = memory.average(remembered, m, (x,))
        noise = curvature.sqrt() * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        gradient = curvature * x + scale * noise
        directions = [-gradient] if u is None else [-gradient, u]
        Q = [[float(v @ (curvature * w)) for w in directions] for v in directions]
        r = [float(gradient @ v) for v in directions]
        step = solve(QuadraticModel(memory=memory), Q, r, at(k, 0.0, remembered.length))
        own, *rest = (c * v for c, v in zip(step.coefficients, directions, strict=True))
        x = x + own + sum(rest)
        u = step.remembered * own + sum(rest)
        if k > 0.8 * steps:
            tail.append(objective(x))
    return sum(tail) / len(tail)


def test_flat_directions_are_followed_faster_through_noise():
    curvature = torch.logspace(-4, 0, 40, dtype=torch.float64)
    assert excess(curvature, LongMemory(), 400) < 0.8 * excess(curvature, None, 400)
    compared = excess(curvature, LongMemory(), 400, compare=True)
    assert compared < 0.8 * excess(curvature, None, 400)


@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_where_noise_is_what_is_left_a_memory_that_is_compared_ends_lower(scale):
    curvature = torch.logspace(-4, 0, 40, dtype=torch.float64)
    compared = excess(curvature, LongMemory(), 2_000, scale, compare=True)
    assert compared < 0.5 * excess(curvature, LongMemory(), 2_000, scale)
