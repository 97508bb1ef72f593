"""A step validated by the gradients at its ends, if no loss is known."""

import math

import pytest
import torch

from kronfac.control import (
    Acceptance,
    AcceptanceState,
    AdaptiveDamping,
    LevenbergMarquardt,
    Measurement,
    Pending,
    Slope,
    SlopeState,
    Verdict,
    after_step,
    validate_slope,
)
from kronfac.storage import pack, unpack

NOTHING = (torch.zeros(1, 1),)


def pending(predicted: float = -1.0, examples: int = 10) -> Pending:
    return Pending(NOTHING, examples, 0.0, 0.0, predicted, 0.5)


def verdict(
    after: Slope,
    before: Slope = Slope(-2.0, 1.0),  # noqa: B008
    *,
    predicted: float = -1.0,
    iteration: int = 5,
    rule: Acceptance | None = None,
    damping: AdaptiveDamping | LevenbergMarquardt | None = None,
    size: float | None = None,
    examples: int = 10,
    summed: bool = False,
) -> Verdict:
    state = after_step(SlopeState(size=size), pending(predicted), before)
    assert isinstance(state, SlopeState)
    m = Measurement(iteration=iteration, examples=examples, summed=summed)
    return validate_slope(rule or Acceptance(), damping or AdaptiveDamping(), state, m, after)


def test_rho_is_exact_for_a_quadratic_objective():
    torch.manual_seed(0)
    root = torch.randn(6, 6, dtype=torch.float64)
    H, theta, delta = root @ root.T, *torch.randn(2, 6, dtype=torch.float64)

    def h(at: torch.Tensor) -> float:
        return float(at @ H @ at / 2)

    ends = [Slope(float(H @ at @ delta), float((H @ at).norm())) for at in (theta, theta + delta)]
    found = verdict(ends[1], ends[0], predicted=-0.3, rule=Acceptance(rejection=None))
    assert found.rho == pytest.approx((h(theta + delta) - h(theta)) / -0.3, rel=1e-10)


@pytest.mark.parametrize(
    ("along", "rejected"), [(-2.0, False), (0.0, False), (3.9, False), (4.1, True)]
)
def test_a_step_is_rejected_if_the_slope_after_it_is_more_than_noise_can_make_it(along, rejected):
    """s₁ > 2 |s₀| with s₀ = −2."""
    found = verdict(Slope(along, 1.0))
    assert (found.cause is not None) is rejected
    assert found.measurement.rejected is rejected


@pytest.mark.parametrize(
    ("size", "usual", "rejected"),
    [(3.9, None, False), (4.1, None, True), (4.1, 2.0, False), (8.1, 2.0, True), (4.1, 0.1, True)],
)
def test_a_step_is_rejected_if_the_gradient_grew_to_more_than_four_times_what_it_is(
    size, usual, rejected
):
    found = verdict(Slope(0.0, size), size=usual)
    assert (found.cause is not None) is rejected


@pytest.mark.parametrize("after", [Slope(math.nan, 1.0), Slope(1.0, math.inf)])
def test_a_step_after_which_the_gradient_is_not_finite_is_rejected(after):
    found = verdict(after)
    assert found.cause is not None
    assert "not finite" in found.cause


@pytest.mark.parametrize("after", [Slope(100.0, 100.0), Slope(math.nan, math.nan)])
def test_no_step_is_rejected_if_none_is_to_be(after):
    found = verdict(after, rule=Acceptance(rejection=None))
    assert found.cause is None
    assert not found.measurement.rejected


@pytest.mark.parametrize("noise", [0.0, 0.3, 1.0])
def test_noise_alone_is_no_rise(noise):
    """A full step from a gradient with the share `noise` of it: s₀ = −(G + N), s₁ = N, M = s₀/2."""
    found = verdict(Slope(2 * noise, 1.0))
    assert found.rho == pytest.approx(1 - noise)
    assert found.cause is None


def test_a_sum_is_compared_in_the_units_of_the_steps_own_mini_batch():
    assert verdict(Slope(3.0, 1.0), examples=20, summed=True).rho == pytest.approx(0.25)
    assert verdict(Slope(3.0, 1.0), examples=20, summed=False).rho == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("damping", "iteration", "follows"),
    [
        (AdaptiveDamping(), 5, True),
        (AdaptiveDamping(), 101, False),
        (AdaptiveDamping(), 105, True),
        (LevenbergMarquardt(), 5, False),
        (LevenbergMarquardt(), 6, True),
    ],
)
def test_lambda_follows_in_turn_and_if_the_loss_rose(damping, iteration, follows):
    good = verdict(Slope(0.0, 1.0), iteration=iteration, damping=damping)
    assert (good.measurement.next_rho is not None) is follows
    assert good.state.validated == (iteration - 1 if follows else 0)
    bad = verdict(Slope(3.0, 1.0), iteration=iteration, damping=damping)
    assert bad.measurement.next_rho == pytest.approx(-0.5)


def test_if_the_model_predicts_a_rise_its_coming_true_is_no_good_news():
    found = verdict(Slope(3.0, 1.0), Slope(1.0, 1.0), predicted=2.0, rule=Acceptance(rejection=10))
    assert found.rho == pytest.approx(1.0)
    assert found.measurement.next_rho == -math.inf


def test_the_average_is_of_gradients_after_accepted_steps():
    accepted = verdict(Slope(0.0, 2.0), size=1.0).state
    rejected = verdict(Slope(0.0, 200.0), size=1.0).state
    assert isinstance(accepted, SlopeState)
    assert isinstance(rejected, SlopeState)
    assert accepted.size == pytest.approx(1.2)
    assert rejected.size == 1.0
    assert accepted.pending is accepted.before is None


def test_what_is_remembered_is_stored():
    state = after_step(AcceptanceState(noise=0.5, validated=3), pending(), Slope(-1.0, 2.0))
    found = unpack(pack(state))
    assert isinstance(found, SlopeState)
    assert (found.before, found.noise, found.validated) == (Slope(-1.0, 2.0), 0.5, 3)


def test_a_step_whose_loss_is_seen_is_validated_by_losses_again():
    state = after_step(SlopeState(size=1.0, noise=0.5), pending())
    assert type(state) is AcceptanceState
    assert state.noise == 0.5
