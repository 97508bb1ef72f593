import math

import pytest

from kronfac.control import FixedGamma, GammaSearch, GammaState, Measurement

OMEGA = (19 / 20) ** 10  # √(19/20) ^ 20


def candidates(rule, iteration: int, gamma: float, lambda_: float, weight_decay: float):
    m = Measurement(iteration=iteration, lambda_=lambda_, weight_decay=weight_decay)
    return rule.candidates(GammaState(gamma), m)


@pytest.mark.parametrize(
    ("rule", "gamma", "weight_decay", "expected"),
    [
        (GammaSearch(), 2.0, 0.0, (2.0, 2.0 * OMEGA, 2.0 / OMEGA)),
        # A floor at √η, or at 1e-4 where that is larger.
        (GammaSearch(), 0.004, 1e-5, (0.004, 1e-5**0.5, 0.004 / OMEGA)),
        (GammaSearch(), 1.1e-4, 0.0, (1.1e-4, 1e-4, 1.1e-4 / OMEGA)),
        (GammaSearch(), 1.1e-4, 1e-12, (1.1e-4, 1e-4, 1.1e-4 / OMEGA)),
        # At the floor two of the three coincide.
        (GammaSearch(), 1e-4, 0.0, (1e-4, 1e-4 / OMEGA)),
        # A ceiling.
        (GammaSearch(maximum=1.0), 0.9, 0.0, (0.9, 0.9 * OMEGA, 1.0)),
        (GammaSearch(maximum=1.0), 1.0, 0.0, (1.0, OMEGA)),
        # A γ above the ceiling, as √λ₀ may be, is compared with the ceiling.
        (GammaSearch(maximum=1.0), 12.0, 0.0, (12.0, 12.0 * OMEGA, 1.0)),
        (GammaSearch(minimum=0.5), 0.6, 1e-5, (0.6, 0.5, 0.6 / OMEGA)),
        # A γ below the floor is compared with the floor.
        (GammaSearch(minimum=0.5), 0.1, 0.0, (0.1, 0.5, 0.1 / OMEGA)),
        (GammaSearch(interval=2, factor=0.5), 2.0, 0.0, (2.0, 0.5, 8.0)),
    ],
)
def test_candidates_at_a_multiple_of_the_interval(rule, gamma, weight_decay, expected):
    """γ, ω₂γ and γ/ω₂ [MG15 §6.6]; γ comes first, so that of equals it stays."""
    actual = candidates(rule, 2 * rule.interval, gamma, 1.0, weight_decay)
    assert actual == pytest.approx(expected, rel=1e-14)
    assert actual[0] == gamma


@pytest.mark.parametrize("iteration", [1, 19, 21, 39])
def test_between_searches_gamma_stays(iteration):
    assert candidates(GammaSearch(), iteration, 2.0, 1.0, 0.0) == (2.0,)


@pytest.mark.parametrize(
    ("rule", "lambda_", "weight_decay", "expected"),
    [
        (GammaSearch(), 150.0, 1e-5, math.sqrt(150.00001)),
        (GammaSearch(maximum=1.0), 150.0, 0.0, math.sqrt(150.0)),
        (GammaSearch(), 0.0, 0.0, 1e-4),
        (GammaSearch(minimum=0.5), 0.01, 0.0, 0.5),
        (FixedGamma(), 3.0, 1.0, 2.0),
        (FixedGamma(0.7), 3.0, 1.0, 0.7),
    ],
)
def test_first_gamma(rule, lambda_, weight_decay, expected):
    m = Measurement(lambda_=lambda_, weight_decay=weight_decay)
    assert rule.init(m).gamma == pytest.approx(expected, rel=1e-14)


def test_fixed_gamma_stays():
    assert candidates(FixedGamma(0.7), 20, 0.7, 150.0, 1e-5) == (0.7,)


@pytest.mark.parametrize(
    ("search", "refresh", "fits"),
    [(20, 20, True), (20, 5, True), (20, 1, True), (20, 3, False), (20, 40, False), (5, 20, False)],
)
def test_searches_happen_where_the_inverse_is_refreshed(search, refresh, fits):
    """T₂ is a multiple of T₃ [MG15 §6.6]."""
    rule = GammaSearch(interval=search)
    if fits:
        rule.check_interval(refresh)
    else:
        with pytest.raises(ValueError, match="multiple of inverse_interval"):
            rule.check_interval(refresh)
    FixedGamma().check_interval(refresh)
