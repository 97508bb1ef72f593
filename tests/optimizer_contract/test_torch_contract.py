"""What torch's own tests ask of every optimizer (`TestOptimRenewed` in its test/test_optim.py), of KFAC.

The tests have the names they have there, where there is one. docs/torch_contract.md has a line for each,
also for those that say nothing of KFAC.
"""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer, lr_scheduler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kronfac import KFAC
from tests.conftest import mlp, normal
from tests.optimizer.runs import same

LOSS = nn.MSELoss()


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    return normal(20, 4, dtype=dtype), normal(20, 3, seed=1, dtype=dtype)


def made(dtype: torch.dtype = torch.float64, **settings: Any) -> KFAC:
    return KFAC(mlp([4, 5, 3], seed=3, dtype=dtype), LOSS, **settings)


def advance(optimizer: KFAC, steps: int) -> list[float]:
    x, y = data(next(optimizer.model.parameters()).dtype)
    return [float(optimizer.step(optimizer.closure(x, y))) for _ in range(steps)]


def parameters(optimizer: KFAC) -> dict[str, Tensor]:
    return copy.deepcopy(dict(optimizer.model.state_dict()))


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda k: min(1.0, k / 3)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [3, 6]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, start_factor=0.01),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20, cycle_momentum=False),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.5),
}


# torch 2.7's own, in SequentialLR
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")
@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_param_group_with_lrscheduler_goes_right_direction(name, tensor):
    optimizer = made(lr=torch.tensor(1.0) if tensor else 1.0)
    schedule = SCHEDULES[name](optimizer)
    losses, rates = [], set()
    for _ in range(12):
        rates.add(float(optimizer.param_groups[0]["lr"]))
        losses += advance(optimizer, 1)
        schedule.step(losses[-1]) if name == "ReduceLROnPlateau" else schedule.step()
    assert losses[-1] < 0.7 * losses[0]
    assert name == "ReduceLROnPlateau" or len(rates) > 1


def test_a_cycle_of_momentum_is_refused_by_torch_itself():
    with pytest.raises(ValueError, match="momentum"):
        lr_scheduler.OneCycleLR(made(), 1.0, total_steps=20)


def test_a_schedule_that_passes_below_a_tenth_is_no_mistake():
    optimizer = made()
    schedule = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for _ in range(5):  # warnings are errors
        advance(optimizer, 1)
        schedule.step()


def test_a_schedule_with_adams_peak_is_warned_of():
    optimizer = made()
    lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=20, cycle_momentum=False)
    with pytest.warns(UserWarning, match="another optimizer's"):
        advance(optimizer, 1)


# ---------------------------------------------------------------------------------------------- state


def test_state_dict_deterministic():
    first, other = made(lr=0.5), made(lr=0.7)
    advance(first, 4)
    other.model.load_state_dict(first.model.state_dict())
    other.load_state_dict(first.state_dict())
    assert advance(first, 4) == advance(other, 4)
    assert same(first.state_dict(), other.state_dict())


def test_save_load_equality_with_weights_only():
    optimizer = made(lr=torch.tensor(0.5))
    advance(optimizer, 3)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    assert same(torch.load(file, weights_only=True), optimizer.state_dict())


def test_non_empty_state():
    optimizer = made()
    advance(optimizer, 1)
    for p in optimizer.model.parameters():
        assert optimizer.state[p]["momentum_buffer"].shape == p.shape
    saved = optimizer.state_dict()
    assert list(saved["state"]) == saved["param_groups"][0]["params"] == [0, 1, 2, 3]


def test_can_load_from_to_named_state_dict():
    plain = made()
    model = mlp([4, 5, 3], seed=3)
    named = KFAC(model, LOSS, params=model.named_parameters())
    assert named.param_groups[0]["param_names"] == [name for name, _ in model.named_parameters()]
    assert advance(plain, 3) == advance(named, 3)
    for source, target in ((plain, named), (named, plain)):
        target.load_state_dict(source.state_dict())
    assert advance(plain, 3) == advance(named, 3)


@pytest.mark.parametrize("inverse", ["block_diagonal", "block_tridiagonal", "ekfac"])
@pytest.mark.parametrize("dtypes", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_a_state_is_loaded_in_another_dtype(dtypes, inverse):
    first, other = (
        made(dtype, inverse=inverse, weight_decay=0.01, fisher="exact") for dtype in dtypes
    )
    advance(first, 6)
    other.model.load_state_dict(first.model.state_dict())
    other.load_state_dict(first.state_dict())
    assert {b["momentum_buffer"].dtype for b in other.state.values()} == {dtypes[1]}
    assert advance(other, 3) == pytest.approx(advance(first, 3), rel=1e-3)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def through_a_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)  # an object of our own, just written


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle, through_a_file])
def test_deepcopy_copies_all_public_attrs(way):
    model = mlp([4, 5, 3], seed=3)
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.1, "name": "body"},
        {"params": [model[2].weight], "lr": 0.5},
    ]
    optimizer = KFAC(model, LOSS, params=groups)
    advance(optimizer, 4)
    other = way(optimizer)
    assert {n for n in vars(optimizer) if n[0] != "_"} == {n for n in vars(other) if n[0] != "_"}
    assert same(optimizer.state_dict(), other.state_dict())
    assert [len(group["params"]) for group in other.param_groups] == [2, 1]
    assert advance(optimizer, 4) == advance(other, 4)
    assert same(parameters(optimizer), parameters(other))


# ---------------------------------------------------------------------------------------------- hooks


def test_step_all_hooks():
    optimizer, seen = made(), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("all pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("all post")),
    ]
    try:
        advance(optimizer, 1)
    finally:
        for handle in handles:
            handle.remove()
    assert seen == ["all pre", "pre", "post", "all post"]


def test_state_dict_pre_post_hook():
    optimizer, seen = made(), []
    optimizer.register_state_dict_pre_hook(lambda o: seen.append(o is optimizer))
    optimizer.register_state_dict_post_hook(lambda o, saved: {**saved, "mine": 1})
    assert optimizer.state_dict()["mine"] == 1
    assert seen == [True]
    assert "mine" not in copy.deepcopy(optimizer).state_dict()


def test_load_state_dict_pre_post_hook():
    optimizer, seen = made(), []
    saved = optimizer.state_dict()

    def pre(o: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        state["param_groups"] = [{**group, "lr": 0.25} for group in state["param_groups"]]
        return state

    optimizer.register_load_state_dict_pre_hook(pre)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
    optimizer.load_state_dict(saved)
    assert seen == [0.25]
    assert saved["param_groups"][0]["lr"] == 1.0, "the caller's own stays as it was"


# --------------------------------------------------------------------------------------------- others


def test_optimizer_can_be_printed():
    assert "lr: 1.0" in repr(made())


def test_forloop_goes_right_direction():
    losses = advance(made(), 10)
    assert losses[-1] < 0.5 * losses[0]


def test_step_is_noop_when_params_have_no_grad():
    model = mlp([4, 5, 3], seed=3)
    model.add_module("unused", nn.Identity())
    model.unused.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = KFAC(model, LOSS, weight_decay=0.5)
    x, y = data()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = LOSS(model(x), y)
        loss.backward()
        return loss

    with pytest.warns(UserWarning, match="left no gradient"):
        optimizer.step(closure)
    assert torch.equal(model.unused.weight, torch.ones(3, dtype=torch.float64))


def test_distributed_checkpoints_initialise_the_state_and_change_nothing():
    optimizer = made(lr=0.5, weight_decay=0.1)
    before, saved = parameters(optimizer), copy.deepcopy(optimizer._state)
    found = get_optimizer_state_dict(optimizer.model, optimizer)
    assert same(parameters(optimizer), before)
    assert all(p.grad is None for p in optimizer.model.parameters())
    assert optimizer._state.iteration == saved.iteration == 0
    assert set(found["state"]) == {name for name, _ in optimizer.model.named_parameters()}
    assert found["param_groups"][0]["lr"] == 0.5
    fresh = made(lr=0.5, weight_decay=0.1)
    assert advance(fresh, 3) == advance(optimizer, 3)


@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_carry_momentum_and_options(flat):
    optimizer, other = made(lr=0.5, weight_decay=0.1), made()
    advance(optimizer, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    found = get_optimizer_state_dict(optimizer.model, optimizer, options=options)
    other.model.load_state_dict(optimizer.model.state_dict())
    set_optimizer_state_dict(other.model, other, found, options=options)
    assert other.param_groups[0]["lr"] == 0.5
    for p, q in zip(optimizer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(optimizer.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])
    assert advance(other, 5)[-1] < advance(made(), 1)[0]
