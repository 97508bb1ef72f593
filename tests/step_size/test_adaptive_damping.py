import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kronfac.step_size import AdaptiveDamping

RULE = AdaptiveDamping()


@pytest.mark.parametrize(
    ("rho", "share", "noisy", "exponent"),
    [
        (2.0, 0.0, True, -2.302585),  # λ so large that it is all there is: by the most
        (1.0, 0.5, True, -2 * (1 - 0.025)),
        (0.1, 0.9, True, -2 * (0.1 - 0.045)),
        (0.0, 1.0, True, 0.1),
        (-0.5, 1.0, True, 1.1),
        (-5.0, 1.0, True, 2.302585),
        (0.5, 1.0, False, 0.0),
        (0.2, 1.0, False, 0.6),
        (0.9, 0.5, False, -2 * (0.9 - 0.25)),
    ],
)
def test_lambda_moves_in_proportion_to_how_far_rho_is_from_its_target(rho, share, noisy, exponent):
    moved = RULE.judged(3.0, rho, share, noisy)
    assert moved == pytest.approx(3.0 * math.exp(exponent), rel=1e-6)


@pytest.mark.parametrize("noisy", [False, True])
def test_a_lambda_that_does_nothing_falls_no_further(noisy):
    assert RULE.judged(1e-5, 1.0, 0.9995, noisy) == 1e-5
    assert RULE.judged(1e-5, -1.0, 0.9995, noisy) > 1e-5


def test_a_step_that_was_taken_back_raises_lambda_tenfold():
    assert RULE.judged(0.2, math.nan, 1.0, noisy=False) == pytest.approx(2.0)


@given(
    lambda_=st.floats(1e-12, 1e12),
    rho=st.floats(allow_nan=True, allow_infinity=True),
    share=st.floats(0, 1),
    noisy=st.booleans(),
)
def test_lambda_stays_positive_and_finite_whatever_rho_is(lambda_, rho, share, noisy):
    moved = RULE.judged(lambda_, rho, share, noisy)
    assert 0.099 * lambda_ <= moved <= 10.01 * lambda_


def test_from_a_thousand_times_too_large_it_comes_down_within_twenty_iterations():
    """In a quadratic bowl of curvature c: s = c/(c + λ), ρ = 2 − s, every iteration."""
    lambda_, curvature = 1e4, 1.0
    for _ in range(20):
        share = curvature / (curvature + lambda_)
        lambda_ = RULE.judged(lambda_, 2 - share, share, noisy=True)
    assert lambda_ < 1e-2


def test_when_rho_is_wanted():
    rule = AdaptiveDamping(settling=4, interval=5)
    assert [k for k in range(1, 22) if rule.judges(k)] == [2, 3, 4, 5, 10, 15, 20]
    assert not any(rule.measures(k) for k in range(1, 22)), "not on the step's own rows"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lambda_": 0.0}, "λ is positive"),
        ({"lambda_": math.nan}, "λ is positive"),
        ({"lambda_": math.inf}, "λ is positive"),
        ({"interval": 0}, "interval"),
        ({"settling": -1}, "settling"),
        ({"target": 1.0}, "target"),
        ({"exact_target": -0.1}, "exact_target"),
        ({"rate": 0.0}, "rate"),
    ],
)
def test_settings_are_checked(settings, what):
    with pytest.raises(ValueError, match=what):
        AdaptiveDamping(**settings)
