"""`KFAC.for_parameters`: an optimizer that learns of its model when that is called."""

import copy
import gc
import io

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from kronfac import KFAC, Categorical
from kronfac.errors import ClosureError, LoopError, UnsupportedLossError
from tests.loop.loops import (
    PROBLEMS,
    same_parameters,
    step_with_closure,
    step_without_closure,
)

PERCEPTRON = PROBLEMS["perceptron"]


@pytest.fixture(autouse=True)
def _no_hook_is_left():
    yield
    gc.collect()
    assert not modules._global_forward_pre_hooks


@pytest.mark.parametrize("step", [step_with_closure, step_without_closure])
@pytest.mark.parametrize("name", ["perceptron", "convolutional"])
def test_the_steps_are_those_of_an_optimizer_with_its_model(name, step):
    problem = PROBLEMS[name]
    one, other = problem.model(), problem.model()
    usual = KFAC(one, problem.loss_fn)
    late = KFAC.for_parameters(other.parameters(), problem.loss_fn, lr=1.0)
    for k, (x, y) in enumerate(problem.batches(4)):
        torch.manual_seed(k)
        step(usual, lambda x=x, y=y: problem.loss(one, x, y))
        torch.manual_seed(k)
        step(late, lambda x=x, y=y: problem.loss(other, x, y))
        assert same_parameters(one, other)
        assert not modules._global_forward_pre_hooks
    assert late.model is other
    assert isinstance(late, KFAC)


def test_a_loss_that_a_closure_calls_need_not_be_given():
    one, other = PERCEPTRON.model(), PERCEPTRON.model()
    usual = KFAC(one, PERCEPTRON.loss_fn)
    late = KFAC.for_parameters(other.parameters(), lr=1.0)
    for x, y in PERCEPTRON.batches(3):
        step_with_closure(usual, lambda x=x, y=y: PERCEPTRON.loss(one, x, y))
        step_with_closure(late, lambda x=x, y=y: PERCEPTRON.loss(other, x, y))
    assert same_parameters(one, other)


def test_a_loss_that_is_not_seen_has_to_be_given():
    model = PERCEPTRON.model()
    late = KFAC.for_parameters(model.parameters(), lr=1.0)
    ((x, y),) = PERCEPTRON.batches(1)
    nn.functional.cross_entropy(model(x), y).backward()
    with pytest.raises(ClosureError, match="was not told the loss"):
        late.step()
    with pytest.raises(UnsupportedLossError, match="was not told the loss"):
        late.step(late.closure(x, y))


@pytest.mark.filterwarnings("ignore:KFAC.step.. has not seen the loss")
def test_a_likelihood_declares_a_functional_loss():
    one, other = PERCEPTRON.model(), PERCEPTRON.model()
    usual = KFAC(one, Categorical())
    late = KFAC.for_parameters(other.parameters(), Categorical(), lr=1.0)
    for x, y in PERCEPTRON.batches(3):
        for optimizer, model in ((usual, one), (late, other)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert same_parameters(one, other)


class Keywords(nn.Module):
    """Called with a keyword alone, as models of Hugging Face are."""

    def __init__(self) -> None:
        super().__init__()
        self.body = PERCEPTRON.make()

    def forward(self, *, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return y


def test_the_first_call_is_recorded_with_its_keyword_arguments():
    torch.manual_seed(3)
    one = Keywords()
    other = copy.deepcopy(one)
    usual = KFAC(one, PERCEPTRON.loss_fn)
    late = KFAC.for_parameters(other.parameters(), PERCEPTRON.loss_fn, lr=1.0)
    for x, y in PERCEPTRON.batches(2):
        for optimizer, model in ((usual, one), (late, other)):
            optimizer.zero_grad()
            PERCEPTRON.loss_fn(model(x=x), y).backward()
            optimizer.step()
    assert same_parameters(one, other)


def test_the_model_is_the_outermost_module_that_holds_all_parameters():
    torch.manual_seed(0)
    inner = PERCEPTRON.make()
    outer = nn.Sequential(nn.Linear(5, 5), inner)
    late = KFAC.for_parameters(outer.parameters(), PERCEPTRON.loss_fn, lr=1.0)
    ((x, y),) = PERCEPTRON.batches(1)
    inner(x)  # holds some
    PERCEPTRON.make()(x)  # holds none
    with torch.no_grad():
        outer(x)  # a validation pass
    with pytest.raises(AttributeError, match="until its model has been called"):
        late.model  # noqa: B018
    wrapper = nn.Sequential(outer, nn.Identity())
    PERCEPTRON.loss_fn(wrapper(x), y).backward()
    late.step()
    assert late.model is wrapper


def test_without_a_call_of_the_model_a_step_says_so():
    model = PERCEPTRON.model()
    late = KFAC.for_parameters(model.parameters(), PERCEPTRON.loss_fn, lr=1.0)
    with pytest.raises(LoopError, match="no module that holds all the given parameters"):
        late.step()
    with pytest.raises(LoopError, match="no module that holds all the given parameters"):
        late.step(lambda: sum(p.sum() for p in model.parameters()))
    late.param_groups[0]["lr"] = 0.0
    assert late.step() is None  # as torch's distributed checkpoints do


def test_before_the_first_call_it_is_an_optimizer_without_a_state():
    model = PERCEPTRON.model()
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.5},
    ]
    late = KFAC.for_parameters(groups, PERCEPTRON.loss_fn, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(late, lambda k: 1 / (1 + k))
    steps: list[int] = []
    late.register_step_pre_hook(lambda *_: steps.append(1))
    held = late.param_groups[0]
    late.zero_grad()
    state = late.state_dict()
    assert state["state"] == {}
    assert [group["lr"] for group in state["param_groups"]] == [1.0, 0.5]
    late.load_state_dict(state)
    assert late.report is None
    assert "lr: 0.5" in repr(late)
    ((x, y),) = PERCEPTRON.batches(1)
    for _ in range(2):
        step_without_closure(late, lambda: PERCEPTRON.loss(model, x, y))
        scheduler.step()
    assert steps == [1, 1]
    assert late.param_groups[0] is held
    assert held["lr"] == pytest.approx(1 / 3)
    assert held["weight_decay"] == 0.01
    assert late.param_groups[1]["lr"] == pytest.approx(0.5 / 3)


def test_a_state_is_loaded_when_the_model_is_known():
    one = PERCEPTRON.model()
    usual = KFAC(one, PERCEPTRON.loss_fn)
    batches = PERCEPTRON.batches(5)
    for x, y in batches[:3]:
        step_without_closure(usual, lambda x=x, y=y: PERCEPTRON.loss(one, x, y))
    other = copy.deepcopy(one)
    late = KFAC.for_parameters(other.parameters(), PERCEPTRON.loss_fn, lr=1.0)
    late.load_state_dict(usual.state_dict())
    assert late.state_dict()["kfac"].keys() == usual.state_dict()["kfac"].keys()
    for x, y in batches[3:]:
        step_without_closure(usual, lambda x=x, y=y: PERCEPTRON.loss(one, x, y))
        step_without_closure(late, lambda x=x, y=y: PERCEPTRON.loss(other, x, y))
    assert same_parameters(one, other)


@pytest.mark.parametrize("pickled", [False, True])
def test_copies_wait_for_the_copy_of_the_model(pickled):
    model = PERCEPTRON.model()
    late = KFAC.for_parameters(model.parameters(), PERCEPTRON.loss_fn, lr=1.0)
    if pickled:
        file = io.BytesIO()
        torch.save((model, late), file)
        file.seek(0)
        other, twin = torch.load(file, weights_only=False)
    else:
        other, twin = copy.deepcopy((model, late))
    for x, y in PERCEPTRON.batches(2):
        step_with_closure(late, lambda x=x, y=y: PERCEPTRON.loss(model, x, y))
        step_with_closure(twin, lambda x=x, y=y: PERCEPTRON.loss(other, x, y))
    assert twin.model is other
    assert same_parameters(model, other)


def test_what_is_wrong_is_refused_at_once():
    model = PERCEPTRON.model()
    with pytest.raises(TypeError, match="lr"):
        KFAC.for_parameters(model.parameters(), PERCEPTRON.loss_fn)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="inverse is one of"):
        KFAC.for_parameters(model.parameters(), lr=1.0, inverse="none")
    with pytest.raises(UnsupportedLossError):
        KFAC.for_parameters(model.parameters(), nn.L1Loss(), lr=1.0)
    with pytest.raises(ValueError, match="lr is one number"):
        KFAC.for_parameters(model.parameters(), lr=-1.0)


def test_another_optimizers_learning_rate_is_warned_of_once():
    model = PERCEPTRON.model()
    with pytest.warns(UserWarning, match="likely another optimizer's") as given:
        late = KFAC.for_parameters(model.parameters(), PERCEPTRON.loss_fn, lr=0.01)
    assert len(given) == 1
    ((x, y),) = PERCEPTRON.batches(1)
    step_without_closure(late, lambda: PERCEPTRON.loss(model, x, y))


def test_an_optimizer_that_is_closed_or_dropped_waits_no_longer():
    model = PERCEPTRON.model()
    late = KFAC.for_parameters(model.parameters(), lr=1.0)
    assert len(modules._global_forward_pre_hooks) == 2
    late.close()
    assert not modules._global_forward_pre_hooks
    late = KFAC.for_parameters(model.parameters(), lr=1.0)
    del late
    gc.collect()
    assert not modules._global_forward_pre_hooks


def test_one_that_waits_does_not_change_the_steps_of_another():
    """Its hooks are on all modules, and are no reason not to compute a perceptron by hand."""
    found = []
    for waits in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        x, y = torch.randn(32, 4), torch.randn(32, 3)
        waiting = KFAC.for_parameters(nn.Linear(2, 2).parameters(), nn.MSELoss(), lr=1.0)
        if not waits:
            waiting.close()
        optimizer = KFAC(model, nn.MSELoss())
        for _ in range(3):
            optimizer.step(optimizer.closure(x, y))
        with torch.no_grad():
            assert optimizer.closure(x, y).by_hand(optimizer.network, False) is not None
        waiting.close()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))
