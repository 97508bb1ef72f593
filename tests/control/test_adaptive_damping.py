import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kronfac.control import (
    AdaptiveDamping,
    DampingState,
    FixedDamping,
    LevenbergMarquardtRule,
    Measurement,
)

RULE = AdaptiveDamping()
DECAY = math.log(19 / 20)


def measured(
    rho: float, share: float = 0.5, noisy: bool = True, elapsed: int = 1, **more
) -> Measurement:
    return Measurement(next_rho=rho, curvature_share=share, noisy=noisy, elapsed=elapsed, **more)


def moved(rule, lambda_: float, m: Measurement) -> float:
    return rule.update(DampingState(lambda_), m).lambda_


@pytest.mark.parametrize(
    ("said", "exponent"),
    [
        (measured(2.0, share=0.0), -math.log(10)),  # λ is all there is: down by the most
        (measured(1.0), DECAY - 1.0),
        (measured(1.0, share=0.99, elapsed=5), 5 * DECAY - 0.02),
        (measured(0.3, share=0.9), DECAY - 0.06),
        (measured(-0.4), DECAY),  # a loss that noise explains is tolerated
        (measured(-0.9), 0.8),
        (measured(-5.0), math.log(10)),
        (measured(-5.0, share=0.4), 0.0),  # λ is most of it already
        (measured(-5.0, share=0.4, noisy=False), math.log(10)),
        (measured(0.5, noisy=False), DECAY - 0.5),
        (measured(0.05, noisy=False), 0.4),  # not where it can't be noise
    ],
)
def test_lambda_moves_as_far_as_rho_and_its_share_say(said, exponent):
    assert moved(RULE, 3.0, said) == pytest.approx(3.0 * math.exp(exponent), rel=1e-9)


@pytest.mark.parametrize("noisy", [False, True])
def test_a_lambda_that_does_nothing_falls_no_further(noisy):
    assert moved(RULE, 1e-5, measured(1.0, 0.9995, noisy)) == 1e-5
    assert moved(RULE, 1e-5, measured(-1.0, 0.9995, noisy)) > 1e-5


def test_a_rejected_step_raises_lambda_tenfold():
    assert moved(RULE, 0.2, measured(math.nan, rejected=True)) == pytest.approx(2.0)
    assert moved(RULE, 0.2, measured(1.0, rejected=True)) == pytest.approx(2.0)


@given(
    lambda_=st.floats(1e-12, 1e12),
    rho=st.floats(allow_nan=True, allow_infinity=True),
    share=st.floats(0, 1),
    noisy=st.booleans(),
    elapsed=st.integers(1, 100),
)
def test_lambda_stays_positive_and_finite_whatever_rho_is(lambda_, rho, share, noisy, elapsed):
    after = moved(RULE, lambda_, measured(rho, share, noisy, elapsed))
    assert 0.099 * lambda_ <= after <= 10.01 * lambda_


@pytest.mark.parametrize("noise", [0.0, 1.0, 3.0])
def test_from_ten_thousand_times_too_large_it_comes_down_within_twenty_iterations(noise):
    """In a bowl of curvature c with noise N/G: s = c/(c + λ), ρ = 2/(1 + N/G) − s."""
    lambda_, curvature = 1e4, 1.0
    for _ in range(20):
        share = curvature / (curvature + lambda_)
        lambda_ = moved(RULE, lambda_, measured(2 / (1 + noise) - share, share))
    assert lambda_ < 2 * max(noise, 0.5)


def test_a_step_that_lambda_makes_invisible_divides_it_by_ten():
    short = {"invisible": True}
    assert moved(RULE, 0.2, measured(math.nan, share=0.4, **short)) == pytest.approx(0.02)
    assert moved(RULE, 0.2, measured(math.nan, share=0.6, **short)) == 0.2


def test_the_papers_rules_see_rejections_too():
    """After a step after which the loss is not finite, which is rejected whatever the rule."""
    back = measured(math.nan, rejected=True)
    assert moved(LevenbergMarquardtRule(), 1.0, back) == pytest.approx((20 / 19) ** 5)
    assert moved(FixedDamping(0.3), 0.3, back) == 0.3


def test_when_rho_is_wanted():
    rule = AdaptiveDamping(settling=4, interval=5)
    assert [k for k in range(1, 22) if rule.measures(k) == "next"] == [2, 3, 4, 5, 10, 15, 20]
    assert not any(rule.measures(k) == "own" for k in range(1, 22))
