import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from kronfac.factors import KroneckerFactors, MovingAverage, ema_decay, sampling_error
from tests.conftest import ALGEBRA, normal

WIDTHS = (3, 4, 2)


def rows(seed: int, count: int = 6) -> list[torch.Tensor]:
    """Rows of each layer, (count, features)."""
    return [normal(count, width, seed=seed + i) for i, width in enumerate(WIDTHS)]


def moments(*all_rows: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Sums of outer products, one row at a time."""
    result = {"own": [], "next": []}
    for i in range(len(WIDTHS)):
        result["own"].append(sum(torch.outer(x, x) for r in all_rows for x in r[i]))
    for i in range(len(WIDTHS) - 1):
        pairs = [(x, y) for r in all_rows for x, y in zip(r[i], r[i + 1], strict=True)]
        result["next"].append(sum(torch.outer(x, y) for x, y in pairs))
    return result


def averaged(previous, decay, a, g, neighbours=True):
    average = MovingAverage(previous, decay, neighbours)
    average.add("A", a, 0.5)
    average.add("G", g, 3.0)
    return average.value(len(a[0]))


@pytest.mark.parametrize(
    ("iteration", "ceiling", "expected"),
    [
        (1, 0.95, 0),
        (2, 0.95, 0.5),
        (10, 0.95, 0.9),
        (20, 0.95, 0.95),
        (21, 0.95, 0.95),
        (3, 0.5, 0.5),
    ],
)
def test_decay_is_that_of_a_plain_average_up_to_its_ceiling(iteration, ceiling, expected):
    assert ema_decay(iteration, ceiling) == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize(
    ("iteration", "memory", "expected"),
    [
        (10, 80.0, 0.9),  # a plain average all the same
        (30, 1.0, 0.95),
        (300, 20.0, 0.95),
        (300, 45.0, 1 - 1 / 45),
    ],
)
def test_without_a_ceiling_it_is_the_papers_or_that_of_momentum(iteration, memory, expected):
    assert ema_decay(iteration, memory=memory) == pytest.approx(expected, rel=1e-15)
    assert ema_decay(iteration, 0.5, memory) == 0.5


def test_without_a_past_it_is_the_weighted_sum_of_outer_products():
    value = averaged(None, 0.9, rows(0), rows(5))
    for i in range(3):
        assert_close(value.A[i], 0.5 * moments(rows(0))["own"][i], **ALGEBRA)
        assert_close(value.G[i], 3.0 * moments(rows(5))["own"][i], **ALGEBRA)
    for i in range(2):
        assert_close(value.A_next[i], 0.5 * moments(rows(0))["next"][i], **ALGEBRA)
        assert_close(value.G_next[i], 3.0 * moments(rows(5))["next"][i], **ALGEBRA)


def test_parts_add_up():
    average = MovingAverage(None, 0.0, neighbours=True)
    for part in (rows(0, 6), rows(10, 2), rows(20, 1)):
        average.add("A", part, 0.5)
        average.add("G", part, 0.5)
    value = average.value(9)
    expected = moments(rows(0, 6), rows(10, 2), rows(20, 1))
    for i in range(3):
        assert_close(value.A[i], 0.5 * expected["own"][i], **ALGEBRA)
    for i in range(2):
        assert_close(value.G_next[i], 0.5 * expected["next"][i], **ALGEBRA)


@given(st.floats(0, 0.999))
def test_averaging_is_a_convex_combination(decay):
    previous = averaged(None, 0.0, rows(0), rows(5))
    new = averaged(None, 0.0, rows(10), rows(15))
    actual = averaged(previous, decay, rows(10), rows(15))
    for name in ("A", "G", "A_next", "G_next"):
        for a, b, c in zip(*(getattr(f, name) for f in (actual, previous, new)), strict=True):
            assert_close(a, decay * b + (1 - decay) * c, **ALGEBRA)


def test_the_first_iterations_are_a_plain_average():
    """ε = 1 − 1/k gives every one of the first estimates the same weight [MG15 §5]."""
    running = None
    for k in range(1, 6):
        running = averaged(running, ema_decay(k, 0.95), rows(10 * k), rows(10 * k + 5))
    estimates = [averaged(None, 0.0, rows(10 * k), rows(10 * k + 5)) for k in range(1, 6)]
    for i in range(3):
        assert_close(running.A[i], torch.stack([e.A[i] for e in estimates]).mean(0), **ALGEBRA)
        assert_close(running.G[i], torch.stack([e.G[i] for e in estimates]).mean(0), **ALGEBRA)


def test_cases_are_as_many_as_would_be_as_sure_with_equal_weights():
    """A mean with weights w of independent cases has the variance of one over 1/Σw² of them."""
    running, weights = None, torch.empty(0, dtype=torch.float64)
    for k, count in enumerate((4, 7, 5, 12, 3) * 6, start=1):
        decay = ema_decay(k, 0.9)
        running = averaged(running, decay, rows(10 * k, count), rows(10 * k + 5, count))
        new = torch.full((count,), (1 - decay) / count, dtype=torch.float64)
        weights = torch.cat([decay * weights, new])
        assert running.cases == pytest.approx(1 / float(weights.square().sum()), rel=1e-12)
    assert float(weights.sum()) == pytest.approx(1)


def test_sampling_error_is_that_of_a_parameter_on_average():
    factors = averaged(None, 0.0, rows(0), rows(5))
    total = parameters = 0.0
    for A, G in zip(factors.A, factors.G, strict=True):
        for _ in range(len(A) * len(G)):
            total += float(torch.linalg.eigvalsh(A).sum() * torch.linalg.eigvalsh(G).sum())
            parameters += 1
    assert sampling_error(factors) == pytest.approx(total / parameters / 6**2, rel=1e-12)


@pytest.mark.parametrize("cases", [400, 1600])
def test_the_sampling_error_makes_up_for_what_an_inverse_is_too_large_by(cases):
    """Of white rows, whose true second moment is the identity, d/n of them being 1/8 and 1/32."""
    rows = normal(cases, 50, seed=1)
    A = rows.mT @ rows / cases
    added = sampling_error(KroneckerFactors((A,), (A,), cases=cases)) ** 0.5
    eigenvalues = torch.linalg.eigvalsh(A)
    too_large = float((1 / eigenvalues).mean()) - 1
    assert too_large == pytest.approx(50 / cases, rel=0.2)
    assert abs(float((1 / (eigenvalues + added)).mean()) - 1) < too_large / 6


def test_without_neighbours_there_are_none():
    value = averaged(None, 0.0, rows(0), rows(5), neighbours=False)
    assert value.A_next == value.G_next == ()


def test_statistics_of_another_network_do_not_mix():
    previous = averaged(None, 0.0, rows(0)[:2], rows(5)[:2])
    with pytest.raises(ValueError, match="zip"):
        averaged(previous, 0.5, rows(0), rows(5))
