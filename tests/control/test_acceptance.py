"""How often mini-batches that differ have a good step rejected, with a stated bound."""

import math
from dataclasses import replace

import pytest
import torch

from kronfac.control.acceptance import DECAY, AcceptanceState, Pending
from kronfac.control.base import Measurement
from kronfac.extend import Acceptance
from tests.conftest import seeded

STEPS = 5000


def rejected(rise: float, spread: float) -> float:
    """The share of steps that are rejected, in units of σ, the deviation of a mini-batch's loss at one θ.

    The loss on the next mini-batch changes by `rise` with the step, and by `spread` σ more or less.
    """
    draws = torch.randn(STEPS, 3, dtype=torch.float64, generator=seeded(7))
    rule, state, count = Acceptance(), AcceptanceState(), 0
    for k, (own, following, noise) in enumerate(draws.tolist(), start=20):
        pending = Pending((), 1, 100 + own, 0.0, predicted_change=-1e-3, curvature_share=1.0)
        before = 100 + following
        after = before + rise + spread * noise
        state, m = replace(state, pending=pending), Measurement(iteration=k)
        verdict = rule.validate(state, m, loss=after, loss_before=before)
        assert verdict is not None
        count += verdict.cause is not None
        state = verdict.state
    return count / STEPS


def test_noise_has_fewer_than_three_good_steps_of_a_hundred_rejected():
    """If a step changes the loss of an example by no more than the losses of examples differ.

    Two mini-batches differ by E|d| = 2σ/√π on average, and a rise by t = 4/√π deviations rejects: 1.2 %.
    The average is over (1 + β)/(1 − β) = 9 validations, and its relative variance of (π/2 − 1)/9 adds half
    of that times t³ φ(t), to second order: below 2.4 % in all. That d itself counts if it is larger than
    the average makes it less again.
    """
    t = 4 / math.sqrt(math.pi)
    known = math.erfc(t / math.sqrt(2)) / 2
    variance = (math.pi / 2 - 1) * (1 - DECAY) / (1 + DECAY)
    density = math.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    bound = known + variance / 2 * t**3 * density
    assert 0.023 < bound < 0.024
    found = rejected(rise=-1e-3, spread=1.0)
    assert 0 < found < bound
    assert found == pytest.approx(0.0125, abs=0.005), "three deviations of 5000 draws"


def test_hardly_one_of_those_that_change_it_half_as_much():
    """2.5 of 10,000, measured over 40,000."""
    assert rejected(rise=-1e-3, spread=0.5) < 1e-3


def test_a_rise_by_ten_deviations_is_hardly_ever_accepted():
    """Only if |d| > 5σ, which is 1 of 2,500, or if the average happens to be 4.4 times what it should."""
    assert rejected(rise=10.0, spread=0.5) > 0.998


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        (1.0, 5.0, "model"),
        (1 + 1e-15, 5.0, "model"),
        (1.1, 5.0, "noise"),
        (1.0, 1.0 + 3e-13, "rounding"),
    ],
)
def test_a_rejection_has_a_reason(before: float, after: float, reason: str):
    """The loss was 1 before the step on its own mini-batch, and is `before` on the next one."""
    pending = Pending((), 1, 1.0, 0.0, predicted_change=-1e-3, curvature_share=1.0)
    state = AcceptanceState(pending=pending)
    m = Measurement(iteration=2, precision=torch.finfo(torch.float64).eps)
    verdict = Acceptance().validate(state, m, loss=after, loss_before=before)
    assert verdict is not None
    assert verdict.cause is not None
    assert verdict.reason == reason
