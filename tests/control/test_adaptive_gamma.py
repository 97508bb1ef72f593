import math
from dataclasses import replace

import pytest

from kronfac.control import AdaptiveGamma, AdaptiveGammaState, Measurement

RULE = AdaptiveGamma()
SINGLE, DOUBLE = 2.0**-23, 2.0**-52


def candidates(
    rule,
    iteration: int,
    gamma: float,
    lambda_: float = 1.0,
    eta: float = 0.0,
    move: float = 1.0,
    **m,
):
    measured = Measurement(iteration=iteration, lambda_=lambda_, weight_decay=eta, **m)
    return rule.candidates(AdaptiveGammaState(gamma, move), measured)


def moved(move: float, tried: tuple[float, ...], chosen: float) -> float:
    state = AdaptiveGammaState(tried[0], move)
    after = RULE.update(state, Measurement(gamma=chosen, candidates=tried))
    assert after.gamma == chosen
    return after.move


def due(inverse_lambda: float, lambda_: float) -> bool:
    m = Measurement(inverse_lambda=inverse_lambda, lambda_=lambda_)
    return RULE.due(AdaptiveGammaState(1.0), m)


def search(cost, gamma: float, refreshes: int) -> list[float]:
    """γ after each refresh, when the candidate of lowest cost is chosen."""
    move, found = 1.0, []
    for k in range(4, 4 + refreshes):
        tried = candidates(RULE, k, gamma, move=move, inverse_age=20)
        assert tried[0] == gamma
        assert len(tried) <= 2, "one extra refresh at the most"
        gamma = min(tried, key=cost)
        move = moved(move, tried, gamma)
        found.append(gamma)
    return found


@pytest.mark.parametrize("best", [1e-3, 0.03, 1.0, 7.0, 300.0])
def test_a_gamma_that_is_decades_away_is_found_in_a_few_refreshes(best):
    found = search(lambda gamma: abs(math.log(gamma / best)), gamma=1.0, refreshes=16)
    assert found[-1] == pytest.approx(best, rel=0.5)


def test_it_goes_on_looking():
    """The best γ falls by 40 % from refresh to refresh, as it does in training."""
    best = 1.0

    def cost(gamma: float) -> float:
        return abs(math.log(gamma / best))

    move, gamma = 1.0, 1.0
    for k in range(4, 34):
        tried = candidates(RULE, k, gamma, move=move, inverse_age=20)
        gamma = min(tried, key=cost)
        move = moved(move, tried, gamma)
        assert abs(math.log(gamma / best)) < math.log(6)
        best = max(best * 0.6, 1e-3)


def test_the_first_refresh_has_one_candidate():
    assert candidates(RULE, 1, 0.7, 0.5) == (0.7,)


def test_where_lambda_has_drifted_gamma_may_follow():
    assert candidates(RULE, 5, 30.0, 0.01, drifted=True) == (30.0, 0.1)
    assert due(1.0, 10.1)
    assert not due(1.0, 10.0), "as after a rejected step"
    assert due(1.0, 0.099)
    assert not due(1.0, 9.9)
    assert not due(1.0, 0.101)


@pytest.mark.parametrize("drifted", [False, True])
def test_where_the_next_mini_batches_do_not_confirm_the_model_gamma_is_of_the_sampling_error(
    drifted,
):
    """A = 4 I of 3 and G = I of 2, from 20 examples: γ = 2.5 √(12 · 2) / 20."""
    expected = 2.5 * math.sqrt(24) / 20

    def tried(iteration: int, gamma: float, confirmed: float, eta: float = 0.0):
        m = {"inverse_age": 20, "drifted": drifted, "sampling_error": 24 / 20**2}
        return candidates(RULE, iteration, gamma, eta=eta, confirmed=confirmed, **m)

    assert len(tried(40, 0.3, 0.55)) == 2
    for gamma in (0.3, 3.0):
        assert tried(40, gamma, 0.45) == (pytest.approx(expected),)
    assert tried(20, 3.0, 0.45) == (pytest.approx(expected),)
    assert tried(20, 0.3, 0.45) == (0.3,), "from few examples it does not rise"
    assert tried(40, 0.3, 0.45, eta=4.0) == (2.0,), "not below √η"


def test_the_pace_is_the_papers_at_first():
    gamma, other = candidates(RULE, 20, 0.3, inverse_age=20)
    assert other == pytest.approx(gamma * (19 / 20) ** 10)
    gamma, other = candidates(RULE, 6, 0.3, inverse_age=2)
    assert other == pytest.approx(gamma * 19 / 20)


def test_what_pays_goes_on_faster_and_what_does_not_turns_round():
    assert moved(1.0, (1.0, 0.6), 0.6) == 1.5
    assert moved(3.0, (1.0, 0.2), 0.2) == 4.0
    assert moved(3.0, (1.0, 0.2), 1.0) == -1.0
    assert moved(-2.0, (1.0, 3.0), 1.0) == 1.0
    assert moved(-2.0, (1.0,), 1.0) == -2.0, "nothing was tried"


def test_from_the_floor_there_is_only_up():
    gamma, other = candidates(RULE, 9, 0.1, 1e-9, 0.01, 2.0, inverse_age=20)
    assert (gamma, other) == (0.1, pytest.approx(0.1 * (20 / 19) ** 10))
    assert moved(2.0, (gamma, other), other) == -3.0
    assert moved(2.0, (gamma, other), gamma) == 1.0


@pytest.mark.parametrize(("confirmed", "share"), [(1.0, 1e-3), (0.0, 1e-2)])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_the_floor_has_the_units_of_the_curvature_and_does_not_vanish_with_it(
    confirmed, share, scale
):
    state = RULE.init(Measurement(lambda_=1e-12 * scale))
    m = Measurement(lambda_=1e-12 * scale, mean_curvature=4 * scale, precision=SINGLE)
    (first,) = RULE.candidates(state, m)
    assert first == pytest.approx(1e-3 * math.sqrt(4 * scale))
    state = RULE.update(state, replace(m, gamma=first, candidates=(first,)))
    for later, expected in ((1e-6, 4.0), (4.0, 4.0), (100.0, 100.0)):
        m = Measurement(
            iteration=30,
            lambda_=1e-12 * scale,
            mean_curvature=later * scale,
            sampling_error=1e-12 * later * scale,
            confirmed=confirmed,
            inverse_age=20,
            precision=SINGLE,
        )
        *_, other = RULE.candidates(replace(state, gamma=1e-6 * math.sqrt(scale)), m)
        assert other == pytest.approx(share * math.sqrt(expected * scale))
        state = RULE.update(state, replace(m, gamma=first, candidates=(first,)))


@pytest.mark.parametrize(
    ("precision", "expected"), [(DOUBLE, 1e-3 * 2.0**-14.5), (SINGLE, 1e-3), (2.0**-10, 1e-3)]
)
def test_the_floor_of_the_search_is_lower_with_more_digits(precision, expected):
    m = {"mean_curvature": 4.0, "inverse_age": 20, "precision": precision}
    _, other = candidates(RULE, 30, 1e-20, 1e-30, move=1.0, **m)
    assert other == pytest.approx(expected * 2.0)


def test_the_floor_by_the_sampling_error_is_the_same_in_all_precisions():
    m = {"mean_curvature": 4.0, "inverse_age": 20, "confirmed": 0.0, "sampling_error": 1e-20}
    for precision in (SINGLE, DOUBLE):
        assert candidates(RULE, 30, 1.0, precision=precision, **m) == (pytest.approx(2e-2),)


def test_the_floor_can_be_chosen():
    rule = AdaptiveGamma(minimum=0.2)
    assert rule.init(Measurement(lambda_=1e-6)).gamma == 0.2
    assert candidates(rule, 5, 0.3, 1e-6, move=2.0, inverse_age=20) == (0.3, 0.2)
    noisy = {"confirmed": 0.0, "sampling_error": 1e-9}
    assert candidates(rule, 40, 0.3, 1e-6, inverse_age=20, **noisy) == (0.2,)


def test_without_a_strength_gamma_is_searched_for_by_the_model_always():
    rule = AdaptiveGamma(strength=None)
    noisy = {"confirmed": -1.0, "sampling_error": 4.0, "inverse_age": 20}
    assert candidates(rule, 40, 0.3, **noisy) == candidates(RULE, 40, 0.3, inverse_age=20)
    assert candidates(RULE, 40, 0.3, **noisy) == (5.0,)


@pytest.mark.parametrize("move", [-4.0, -1.0, 1.0, 4.0])
def test_a_refresh_that_was_long_in_coming(move):
    rule = AdaptiveGamma()
    for gamma in (1e-4, 1.0):
        tried = candidates(rule, 60_000, gamma, move=move, inverse_age=30_000)
        assert all(0 < value < math.inf for value in tried)
