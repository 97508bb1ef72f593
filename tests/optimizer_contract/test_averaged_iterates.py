"""`eval()` and `train()`: the average of the iterates in the model, and training as if nothing had been."""

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from kronfac import KFAC, RawStep
from kronfac.errors import LoopError, StateError
from kronfac.report import EventKind
from tests.conftest import mlp, normal

DECAY = 0.7


def new_optimizer(decay: float | None = DECAY, **settings) -> KFAC:
    return KFAC(mlp([3, 6, 2], seed=1), nn.MSELoss(), average_decay=decay, **settings)


def take(optimizer: KFAC, steps: range) -> None:
    for k in steps:
        x = normal(20, 3, seed=k)
        optimizer.step(optimizer.closure(x, x[:, :2].sin()))


def parameters(optimizer: KFAC) -> list[torch.Tensor]:
    return [p.detach().clone() for p in optimizer.model.parameters()]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def average(iterates, decay):
    """θ̄ by its definition: the weight of each iterate written out."""
    weights: list[float] = []
    for t in range(1, len(iterates) + 1):
        new = max(1 / t, 1 - decay)
        weights = [weight * (1 - new) for weight in weights] + [new]
    assert sum(weights) == pytest.approx(1)
    return [
        sum(w * p for w, p in zip(weights, ps, strict=True)) for ps in zip(*iterates, strict=True)
    ]


@pytest.mark.parametrize("decay", [0.0, 0.7, 0.99])
def test_eval_shows_the_average_of_the_iterates(decay):
    optimizer = new_optimizer(decay)
    iterates = []
    for k in range(8):
        take(optimizer, range(k, k + 1))
        assert not optimizer.report.rejected
        iterates.append(parameters(optimizer))
        optimizer.eval()
        for found, expected in zip(parameters(optimizer), average(iterates, decay), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        optimizer.train()
        assert_same(parameters(optimizer), iterates[-1])


def test_a_rejected_step_is_not_in_the_average():
    optimizer = new_optimizer()
    take(optimizer, range(1))
    starts = []
    for k in range(1, 4):
        starts.append(parameters(optimizer))
        take(optimizer, range(k, k + 1))
    starts.append(parameters(optimizer))
    sensible = optimizer.settings
    optimizer.settings = replace(sensible, step_size=RawStep(1e4))
    take(optimizer, range(4, 5))
    optimizer.settings = sensible
    take(optimizer, range(5, 6))
    assert optimizer.report.rejected
    # The parameters before the rejected step, where the next one starts from again.
    starts.append(starts[-1])
    expected = average([*starts, parameters(optimizer)], DECAY)
    optimizer.eval()
    for found, mean in zip(parameters(optimizer), expected, strict=True):
        torch.testing.assert_close(found, mean, rtol=1e-12, atol=1e-14)


def test_training_goes_on_as_if_there_had_been_no_evaluation():
    optimizer, undisturbed = new_optimizer(), new_optimizer()
    for k in range(6):
        take(optimizer, range(k, k + 1))
        optimizer.eval()
        optimizer.eval()
        optimizer.model(normal(5, 3, seed=0))
        optimizer.train()
        optimizer.train()
    take(undisturbed, range(6))
    assert_same(parameters(optimizer), parameters(undisturbed))
    plain = new_optimizer(None)
    take(plain, range(6))
    assert_same(parameters(optimizer), parameters(plain))
    assert not any(note.kind is EventKind.PARAMETERS_CHANGED for note in optimizer.report.notes)


def test_micro_batches_before_an_evaluation_count():
    loss_fn = nn.MSELoss()
    found = []
    for evaluates in (False, True):
        model = mlp([3, 6, 2], seed=1)
        optimizer = KFAC(model, loss_fn, average_decay=DECAY)
        for k in range(4):
            optimizer.zero_grad()
            for part in range(2):
                x = normal(10, 3, seed=10 * k + part)
                (loss_fn(model(x), x[:, :2].sin()) / 2).backward()
                if evaluates and k:
                    optimizer.eval()
                    optimizer.train()
            optimizer.step()
        found.append(parameters(optimizer))
    assert_same(*found)


def test_without_an_average_nothing_is_done():
    optimizer = new_optimizer(None)
    for k in range(2):
        before = parameters(optimizer)
        optimizer.eval()
        assert_same(parameters(optimizer), before)
        take(optimizer, range(k, k + 1))
        optimizer.train()
    early = new_optimizer()
    before = parameters(early)
    early.eval()
    assert_same(parameters(early), before)
    take(early, range(1))


def test_a_step_from_the_average_is_refused():
    optimizer = new_optimizer()
    take(optimizer, range(3))
    optimizer.eval()
    shown = parameters(optimizer)
    with pytest.raises(LoopError, match=r"optimizer\.train\(\) before the forward pass"):
        take(optimizer, range(3, 4))
    assert_same(parameters(optimizer), shown)
    optimizer.train()
    take(optimizer, range(3, 4))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("way", ["state_dict", "deepcopy", "pickle"])
def test_a_run_continues_from_either_mode(mode, way):
    optimizer = new_optimizer()
    take(optimizer, range(4))
    getattr(optimizer, mode)()
    if way == "state_dict":
        buffer = io.BytesIO()
        torch.save([optimizer.model.state_dict(), optimizer.state_dict()], buffer)
        buffer.seek(0)
        model, state = torch.load(buffer, weights_only=True)
        other = new_optimizer()
        other.model.load_state_dict(model)
        other.load_state_dict(state)
    else:
        other = (
            copy.deepcopy(optimizer) if way == "deepcopy" else pickle.loads(pickle.dumps(optimizer))
        )
    for one in (optimizer, other):
        one.train()
        take(one, range(4, 7))
    assert_same(parameters(other), parameters(optimizer))
    for one in (optimizer, other):
        one.eval()
    assert_same(parameters(other), parameters(optimizer))


def test_an_average_of_another_shape_is_refused():
    optimizer = new_optimizer()
    take(optimizer, range(3))
    state = optimizer.state_dict()
    state["kfac"]["average"]["mean"] = state["kfac"]["average"]["mean"][:1]
    before = parameters(optimizer)
    with pytest.raises(StateError, match="average"):
        optimizer.load_state_dict(state)
    assert_same(parameters(optimizer), before)


def test_an_average_may_be_begun_and_given_up_later():
    optimizer = new_optimizer(None)
    take(optimizer, range(3))
    begun = new_optimizer()
    begun.model.load_state_dict(optimizer.model.state_dict())
    begun.load_state_dict(optimizer.state_dict())
    first = parameters(begun)
    take(begun, range(3, 4))
    iterates = [first, parameters(begun)]
    begun.eval()
    for found, mean in zip(parameters(begun), average(iterates, DECAY), strict=True):
        torch.testing.assert_close(found, mean, rtol=1e-12, atol=1e-14)
    optimizer.model.load_state_dict(begun.model.state_dict())
    optimizer.load_state_dict(begun.state_dict())
    optimizer.train()
    assert_same(parameters(optimizer), iterates[-1])
    take(optimizer, range(4, 5))
    assert optimizer.state_dict()["kfac"]["average"] is None


def test_parameters_that_are_added_begin_another_average():
    model = mlp([3, 6, 2], seed=1)
    last = model[-1]
    optimizer = KFAC(model, nn.MSELoss(), params=list(model[0].parameters()), average_decay=DECAY)
    take(optimizer, range(3))
    optimizer.eval()
    optimizer.add_param_group({"params": list(last.parameters())})
    take(optimizer, range(3, 5))
    optimizer.eval()
    optimizer.train()


@pytest.mark.parametrize("decay", [1.0, -0.1, float("nan")])
def test_a_decay_that_makes_no_average_is_refused(decay):
    with pytest.raises(ValueError, match=r"average_decay.*lies in \[0, 1\)"):
        new_optimizer(decay)


def test_an_optimizer_that_waits_for_its_model_has_both_modes():
    model = mlp([3, 6, 2], seed=1)
    optimizer = KFAC.for_parameters(model.parameters(), nn.MSELoss(), lr=1.0, average_decay=DECAY)
    optimizer.eval()
    optimizer.train()
    x = normal(20, 3, seed=0)
    nn.MSELoss()(model(x), x[:, :2])
    for k in range(3):
        optimizer.zero_grad()
        take(optimizer, range(k, k + 1))
    iterate = parameters(optimizer)
    optimizer.eval()
    assert not torch.equal(parameters(optimizer)[0], iterate[0])
    optimizer.train()
    assert_same(parameters(optimizer), iterate)


def test_the_plan_counts_the_average():
    model, x = mlp([3, 6, 2], seed=1), normal(20, 3, seed=0)
    without, with_average = (
        KFAC(model, nn.MSELoss(), average_decay=decay).plan(x) for decay in (None, DECAY)
    )
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    assert with_average.memory.state - without.memory.state == size
    assert with_average.memory.rollback == without.memory.rollback


def test_one_that_waits_for_its_model_resumes_from_a_state_of_an_evaluation():
    optimizer = new_optimizer()
    take(optimizer, range(3))
    expected = parameters(optimizer)
    optimizer.eval()
    model = mlp([3, 6, 2], seed=1)
    model.load_state_dict(optimizer.model.state_dict())
    loss_fn = nn.MSELoss()
    late = KFAC.for_parameters(model.parameters(), loss_fn, lr=1.0, average_decay=DECAY)
    late.load_state_dict(optimizer.state_dict())
    late.train()
    x = normal(20, 3, seed=0)
    outputs = model(x)
    assert_same([p.detach() for p in model.parameters()], expected)
    loss_fn(outputs, x[:, :2].sin()).backward()
    late.step()


@pytest.mark.parametrize("weights_first", [False, True])
def test_a_state_that_is_loaded_during_an_evaluation_does_not_lose_the_parameters(weights_first):
    optimizer = new_optimizer()
    take(optimizer, range(3))
    expected, state = parameters(optimizer), copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(optimizer.model.state_dict())
    take(optimizer, range(3, 4))
    latest = parameters(optimizer)
    optimizer.eval()
    if weights_first:
        optimizer.model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    optimizer.train()
    assert_same(parameters(optimizer), expected if weights_first else latest)


def test_a_copy_inside_of_its_own_model_has_both_modes():
    model = mlp([3, 6, 2], seed=1)
    model.optimizer = KFAC(model, nn.MSELoss(), average_decay=DECAY)
    take(model.optimizer, range(3))
    expected = parameters(model.optimizer)
    model.optimizer.eval()
    other = copy.deepcopy(model)
    other.optimizer.train()
    assert_same([p.detach() for p in other.parameters()], expected)
    take(other.optimizer, range(3, 4))
