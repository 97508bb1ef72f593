import math

import pytest

from kronfac.control import DampingState, FixedDamping, LevenbergMarquardtRule, Measurement

OMEGA = (19 / 20) ** 5


def updated(rule, lambda_: float, rho: float) -> float:
    return rule.update(DampingState(lambda_), Measurement(rho=rho)).lambda_


@pytest.mark.parametrize(
    ("rho", "factor"),
    [
        (0.76, OMEGA),
        (1.0, OMEGA),
        (50.0, OMEGA),
        (math.inf, OMEGA),
        (0.75, 1.0),
        (0.5, 1.0),
        (0.25, 1.0),
        (0.24, 1 / OMEGA),
        (0.0, 1 / OMEGA),
        (-3.0, 1 / OMEGA),
        (-math.inf, 1 / OMEGA),
        (math.nan, 1 / OMEGA),
    ],
)
def test_rule_of_the_paper(rho, factor):
    """ρ > ¾: λ ← ω₁λ; ρ < ¼: λ ← λ/ω₁, ω₁ = (19/20)^T₁, T₁ = 5 [MG15 §6.5]."""
    rule = LevenbergMarquardtRule(lambda_=150.0)
    assert updated(rule, 8.0, rho) == pytest.approx(8.0 * factor, rel=1e-14)


@pytest.mark.parametrize(("interval", "decay"), [(1, 0.95), (5, 0.9), (10, 1.0)])
def test_omega_is_the_decay_of_a_whole_interval(interval, decay):
    rule = LevenbergMarquardtRule(interval=interval, decay=decay)
    assert updated(rule, 1.0, 1.0) == pytest.approx(decay**interval, rel=1e-14)
    assert [k for k in range(1, 31) if rule.measures(k) == "own"] == list(
        range(interval, 31, interval)
    )


def test_fixed_damping_never_measures_nor_moves():
    rule = FixedDamping(0.3)
    assert not any(rule.measures(k) for k in range(1, 50))
    assert updated(rule, 0.3, -1.0) == 0.3
