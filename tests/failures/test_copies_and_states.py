"""Copies and saved states: complete, or refused with a reason before anything is touched."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, KronfacError
from tests.conftest import mlp, normal
from tests.optimizer.runs import same

Path = tuple[Any, ...]


def trained(steps: int = 6, **settings: Any) -> KFAC:
    optimizer = KFAC(mlp([4, 5, 3]), nn.MSELoss(), weight_decay=0.01, **settings)
    advance(optimizer, range(steps))
    return optimizer


def advance(optimizer: KFAC, steps: range) -> None:
    for k in steps:
        optimizer.step(optimizer.closure(normal(9, 4, seed=k), normal(9, 3, seed=100 + k)))


# -------------------------------------------------------------------------------------------- copies


HOLDERS: dict[str, Callable[[KFAC], Any]] = {
    "the model": lambda optimizer: optimizer.model,
    "a layer": lambda optimizer: optimizer.model[0],
    "a container": lambda optimizer: nn.Sequential(optimizer.model),
    "the optimizer's own model": lambda optimizer: optimizer,
}


@pytest.mark.parametrize("way", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("place", HOLDERS)
def test_a_module_that_holds_its_own_optimizer_is_copied_with_it(place, way):
    optimizer = trained()
    holder = HOLDERS[place](optimizer)
    if place == "the optimizer's own model":
        optimizer.model.optimizer = optimizer
        other = way(optimizer)
        assert other.model.optimizer is other
    else:
        holder.optimizer = optimizer
        copied = way(holder)
        other = copied.optimizer
        assert place != "the model" or other.model is copied
    assert other.report.iteration == 6
    for run in (optimizer, other):
        advance(run, range(6, 9))
    assert same(dict(other.model.state_dict()), dict(optimizer.model.state_dict()))


# ---------------------------------------------------------------------------- damaged and foreign states


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value in a nested state, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, (*path, key))
    elif isinstance(value, (list, tuple)) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def changed(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at the end of this path."""
    if not path:
        return new
    key, *rest = path
    if isinstance(value, dict):
        return value | {key: changed(value[key], tuple(rest), new)}
    items = [*value]
    items[key] = changed(items[key], tuple(rest), new)
    return type(value)(items)


def without(value: Any, path: Path) -> Any:
    """A copy without the last key of this path."""
    *parents, key = path
    holder = value
    for step in parents:
        holder = holder[step]
    if isinstance(holder, dict):
        fewer: Any = {name: item for name, item in holder.items() if name != key}
    else:
        fewer = type(holder)(item for index, item in enumerate(holder) if index != key)
    return changed(value, tuple(parents), fewer)


def nan_tensors(state: Any) -> Iterator[tuple[Path, Any]]:
    for path, leaf in leaves(state):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            yield path, changed(state, path, torch.full_like(leaf, math.nan))


def other_shapes(state: Any) -> Iterator[tuple[Path, Any]]:
    for path, leaf in leaves(state):
        if isinstance(leaf, Tensor):
            yield path, changed(state, path, leaf.new_zeros((*leaf.shape, 2)))


def other_types(state: Any) -> Iterator[tuple[Path, Any]]:
    for path, leaf in leaves(state):
        yield path, changed(state, path, leaf.tolist() if isinstance(leaf, Tensor) else "damaged")


def missing_entries(state: Any) -> Iterator[tuple[Path, Any]]:
    for path, _ in leaves(state):
        yield path, without(state, path)


DAMAGES = [nan_tensors, other_shapes, other_types, missing_entries]


@pytest.mark.parametrize("weight_decay", [-1.0, math.nan, math.inf, "0.1", None])
def test_a_weight_decay_that_is_none_is_refused(weight_decay):
    state = trained().state_dict()
    damaged = state
    for path, _ in leaves(state):
        if path[-1] == "weight_decay":
            damaged = changed(damaged, path, weight_decay)
    optimizer = trained(steps=3)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KronfacError, match="weight_decay"):
        optimizer.load_state_dict(damaged)
    assert same(optimizer.state_dict(), before)
