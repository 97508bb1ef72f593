"""Schedules, dtypes and distributed checkpoints of torch's, with KFAC.

`test_optimizer_info.py` has what torch's own tests ask of every optimizer; docs/torch_contract.md lists
all of them.
"""

import copy
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

from kronfac import KFAC
from kronfac.errors import StateError
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


def test_distributed_checkpoints_initialise_the_state_and_change_nothing():
    optimizer = made(lr=0.5, weight_decay=0.1)
    before = parameters(optimizer)
    found = get_optimizer_state_dict(optimizer.model, optimizer)
    assert same(parameters(optimizer), before)
    assert all(p.grad is None for p in optimizer.model.parameters())
    assert optimizer.state_dict()["kfac"]["iteration"] == 0
    assert set(found["state"]) == {name for name, _ in optimizer.model.named_parameters()}
    assert found["param_groups"][0]["lr"] == 0.5
    fresh = made(lr=0.5, weight_decay=0.1)
    assert advance(fresh, 3) == advance(optimizer, 3)


@pytest.mark.parametrize("flat", [False, True])
def test_what_distributed_checkpoints_leave_out_is_asked_for(flat):
    optimizer, other = made(lr=0.5, weight_decay=0.1), made()
    advance(optimizer, 3)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    found = get_optimizer_state_dict(optimizer.model, optimizer, options=options)
    with pytest.raises(StateError, match=r"no entry 'kfac'.*WholeState"):
        set_optimizer_state_dict(other.model, other, found, options=options)
