"""The mini-batch grows where the next one does not confirm a step's promise, and where the loss stalls."""

from dataclasses import dataclass
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kronfac import KFAC, AdaptiveBatchSampler, AdaptiveDamping, StepReport
from kronfac.errors import StateError
from tests.conftest import mlp, normal


@dataclass
class Scripted:
    """Reports what it is told to."""

    report: StepReport | None = None

    memory: float = 1.0

    def says(self, iteration: int, rho: float | None, cases: int = 0) -> None:
        self.report = StepReport(
            iteration, 1.0, 1.0, 1.0, next_rho=rho, examples=cases, memory=self.memory
        )


def sizes(sampler: AdaptiveBatchSampler, optimizer: Scripted, rhos: list[float | None]):
    found = []
    for rho in rhos:
        optimizer.says(sampler.iteration + 1, rho)
        found.append(len(sampler.next_indices()))
    return found


def test_it_stays_while_the_promises_are_kept():
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(10_000, optimizer)
    assert len(sampler.next_indices()) == 500, "before the first step"
    assert set(sizes(sampler, optimizer, [1.0, 0.5, None, 0.2, 0.1] * 10)) == {500}


def test_it_grows_by_a_factor_with_every_measurement_that_disappoints():
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(2_000, optimizer, initial=100, growth=1.5, threshold=0.05)
    found = sizes(sampler, optimizer, [0.0] * 40)
    # The average starts at 1 and falls by a quarter each time: 0.75¹⁰ = 0.056, 0.75¹¹ = 0.042.
    assert found[:11] == [100] * 10 + [150]
    assert found[11:14] == [225, 338, 506]
    assert found[-1] == 2_000, "never more than there are"
    assert found == sorted(found)


def test_an_iteration_counts_once_and_one_that_measured_nothing_not_at_all():
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(10_000, optimizer, initial=100)
    optimizer.says(1, 0.0)
    assert {len(sampler.next_indices()) for _ in range(30)} == {100}
    assert set(sizes(sampler, optimizer, [None, float("nan")] * 20)) == {100}


def test_final_bounds_it_and_small_data_sets_are_taken_whole():
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(10_000, optimizer, initial=100, final=130)
    assert sizes(sampler, optimizer, [-1.0] * 30)[-1] == 130
    assert len(AdaptiveBatchSampler(40, optimizer).next_indices()) == 40


def test_a_mini_batch_has_no_case_twice():
    sampler = AdaptiveBatchSampler(50, Scripted(), initial=50)
    assert sorted(sampler.next_indices().tolist()) == list(range(50))


@pytest.mark.parametrize("m", [1, 2, 3, 4, 5])
def test_what_the_next_mini_batch_of_a_pass_sees_tells_what_all_cases_see(m):
    """h_i = ½ (θ − x_i)² on six cases, a Newton step from m of them: all pairs of mini-batches, exactly.

    Those after a mini-batch of more than half of the cases have all that were left, and others again.
    """
    x, theta = [0.3, -1.2, 2.0, 0.7, -0.4, 1.9], 0.1

    def h(at: float, cases) -> float:
        return sum((at - x[i]) ** 2 / 2 for i in cases) / len(cases)

    sums, pairs = [0.0, 0.0, 0.0], 0
    for batch in combinations(range(6), m):
        left = set(range(6)) - set(batch)
        for following in combinations(range(6), m):
            if len(left & set(following)) < min(m, len(left)):
                continue
            after = sum(x[i] for i in batch) / m
            changes = [h(after, cases) - h(theta, cases) for cases in (batch, following, range(6))]
            sums, pairs = [a + b for a, b in zip(sums, changes, strict=True)], pairs + 1
    predicted, following, everywhere = (total / pairs for total in sums)
    factor = max(m / 6, 1 - m / 6)
    expected = 1 - factor * (1 - following / predicted)
    assert everywhere / predicted == pytest.approx(expected)


def test_it_grows_to_the_whole_where_all_is_noise():
    """On all cases together the ρ of a step that fits nothing but noise is −1."""
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(1000, optimizer, initial=100)
    m = len(sampler.next_indices())
    for k in range(60):
        optimizer.says(k + 1, 1 - 2 / max(m / 1000, 1 - m / 1000), cases=m)
        m = len(sampler.next_indices())
    assert m == 1000


def test_a_share_of_the_data_is_taken_into_account():
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(1000, optimizer, initial=400)
    for k in range(40):
        optimizer.report = StepReport(k + 1, 1.0, 1.0, 1.0, next_rho=-0.6, examples=400)
        sampler.next_indices()
    assert sampler.size == 400, "of all cases ρ is 0.6 (−0.6) + 0.4 = 0.04"
    for k in range(40, 80):
        optimizer.report = StepReport(k + 1, 1.0, 1.0, 1.0, next_rho=-0.7, examples=400)
        sampler.next_indices()
    assert sampler.size == 1000, "it grows with each of them, to the whole"


def after_losses(sampler: AdaptiveBatchSampler, optimizer: Scripted, losses: list[float | None]):
    """m after each of them."""
    found = []
    for k, loss in enumerate(losses, start=1):
        optimizer.report = StepReport(k, 1.0, 1.0, 1.0, mean_loss=loss, memory=optimizer.memory)
        found.append(len(sampler.next_indices()))
    return found


def test_it_leaps_where_the_loss_has_stopped_falling():
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(10_000, optimizer, initial=100, patience=4, leap=1.5)
    found = after_losses(sampler, optimizer, [2.0, 1.0] * 20)
    # Eight losses for the first look, and for every look after a leap.
    assert found[:8] == [100] * 7 + [150]
    assert found[8:24] == [150] * 7 + [225] + [225] * 7 + [338]


@pytest.mark.parametrize(("memory", "largest"), [(31.0, 338), (32.0, 250)])
def test_where_momentum_remembers_four_passes_rho_is_a_guide_up_to_an_eighth(memory, largest):
    """32 mini-batches of an eighth are four passes, 31 are not."""
    optimizer = Scripted(memory=memory)
    sampler = AdaptiveBatchSampler(2_000, optimizer, initial=100, growth=1.5)
    assert sizes(sampler, optimizer, [0.0] * 60)[-1] == largest


def test_from_an_eighth_on_losses_have_to_stand_still_for_as_long_as_is_remembered():
    optimizer = Scripted(memory=40.0)
    sampler = AdaptiveBatchSampler(800, optimizer, initial=80, patience=4, leap=1.5)
    found = after_losses(sampler, optimizer, [2.0, 1.0] * 300)
    leaps = [k + 2 for k, (a, b) in enumerate(pairwise(found)) if b > a]
    # Not above an eighth at once; from there on twice 40 losses for each, up to all cases.
    assert leaps == [8, 88, 168, 248, 328, 408, 488]
    assert [found[k - 1] for k in leaps] == [100, 150, 225, 338, 506, 759, 800]


def test_a_fall_has_to_be_larger_than_its_standard_error():
    """Halves of four losses, each ± 1 around its mean: variance 4/3, error of the difference √(2/3)."""
    for fall, stalled in ((0.80, True), (0.83, False)):
        optimizer = Scripted()
        sampler = AdaptiveBatchSampler(10_000, optimizer, initial=100, patience=4)
        losses = [6.0, 4.0] * 2 + [6.0 - fall, 4.0 - fall] * 2
        assert (after_losses(sampler, optimizer, losses)[-1] > 100) == stalled


def test_it_stays_while_the_loss_falls_and_where_there_is_none():
    optimizer = Scripted()
    falling = [0.95**k for k in range(100)]
    assert after_losses(AdaptiveBatchSampler(10_000, optimizer), optimizer, falling)[-1] == 500
    nothing: list[float | None] = [None, float("nan"), float("inf")] * 20
    assert after_losses(AdaptiveBatchSampler(10_000, optimizer), optimizer, nothing)[-1] == 500
    never = AdaptiveBatchSampler(10_000, optimizer, patience=None)
    assert after_losses(never, optimizer, [2.0, 1.0] * 40)[-1] == 500


def test_losses_are_saved():
    optimizer, losses = Scripted(), [2.0, 1.0] * 9
    sampler = AdaptiveBatchSampler(10_000, optimizer)
    after_losses(sampler, optimizer, losses)
    other = Scripted()
    again = AdaptiveBatchSampler(10_000, other)
    again.load_state_dict(sampler.state_dict())
    assert after_losses(again, other, [2.0, 1.0, 1.0]) == [500, 750, 750]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_summed_loss_is_compared_by_its_mean(reduction):
    x, y = normal(30, 3), normal(30, 2, seed=1)
    optimizer = KFAC(mlp([3, 4, 2]), nn.MSELoss(reduction=reduction))
    loss = float(optimizer.step(optimizer.closure(x, y)))
    expected = loss if reduction == "mean" else loss / 30
    assert optimizer.report.mean_loss == pytest.approx(expected, rel=1e-12)


def test_losses_too_large_to_be_squared_are_no_reason_to_grow():
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(10_000, optimizer, initial=100, patience=2)
    for iteration, loss in enumerate([1e160, 1e10, 1e150, 3e155, 1e308, 1e308], start=1):
        optimizer.report = StepReport(iteration, loss, 1.0, 1.0, mean_loss=loss)
        assert len(sampler.next_indices()) == 100


def test_every_case_comes_once_before_any_comes_again():
    sampler = AdaptiveBatchSampler(50, Scripted(), initial=12)
    batches = [sampler.next_indices().tolist() for _ in range(25)]
    assert all(len(set(batch)) == 12 for batch in batches), "and none twice in a mini-batch"
    drawn = [index for batch in batches for index in batch]
    passes = [drawn[start : start + 50] for start in range(0, 300, 50)]
    assert all(sorted(order) == list(range(50)) for order in passes)
    assert len({tuple(order) for order in passes}) == 6


def test_it_continues_exactly():
    optimizer = Scripted()
    sampler = AdaptiveBatchSampler(3_000, optimizer, initial=20, seed=4)
    sizes(sampler, optimizer, [0.0] * 15)
    optimizer.says(16, -1.0)  # not yet looked at when the state is saved
    state = sampler.state_dict()
    expected = [sampler.next_indices() for _ in range(200)]
    again = AdaptiveBatchSampler(3_000, Scripted(), initial=20, seed=9)
    again.load_state_dict(state)
    assert again.size == sampler.size
    for indices in expected:
        assert torch.equal(again.next_indices(), indices)
    with pytest.raises(StateError, match="3000 cases"):
        AdaptiveBatchSampler(3_001, optimizer).load_state_dict(state)


def test_with_a_real_optimizer_and_a_data_loader():
    """On pure noise nothing is confirmed, and the mini-batch grows to the whole."""
    x, y = normal(400, 3), normal(400, 2, seed=1)
    optimizer = KFAC(mlp([3, 8, 2]), nn.MSELoss(), damping=AdaptiveDamping(settling=100))
    sampler = AdaptiveBatchSampler(400, optimizer, initial=16, growth=1.5)
    found = []
    for (inputs, targets), _ in zip(
        DataLoader(TensorDataset(x, y), batch_sampler=sampler), range(60), strict=False
    ):
        optimizer.step(optimizer.closure(inputs, targets))
        found.append(len(inputs))
    assert len(found) == 60
    assert found[0] == 16
    assert found == sorted(found)
    assert found[-1] == 400


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"initial": 0}, "initial"),
        ({"initial": 20, "final": 10}, "final"),
        ({"threshold": 1.0}, "threshold"),
        ({"growth": 1.0}, "growth"),
        ({"leap": 1.0}, "leap"),
        ({"patience": 1}, "patience"),
    ],
)
def test_settings_are_checked(settings, what):
    with pytest.raises(ValueError, match=what):
        AdaptiveBatchSampler(100, Scripted(), **settings)
