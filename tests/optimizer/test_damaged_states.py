"""States that were damaged, or made by hand: refused with what is wrong, and nothing is touched."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from operator import getitem
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kronfac
from kronfac import KFAC, Intervals
from kronfac.errors import StateError
from kronfac.extend import BlockDiagonalInverse, BlockTridiagonalInverse, ExactTikhonov
from kronfac.storage import Storable
from tests.conftest import mlp, normal
from tests.optimizer.resume import contents, through_a_file
from tests.optimizer.runs import Snapshot, same

LOSS = nn.MSELoss()
Path = tuple[Any, ...]


class Scaled(nn.Module):
    """A network with a parameter that no adapter knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp([4, 5, 3], seed=3)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x) * self.scale
        return z


SETTINGS: dict[str, dict[str, Any]] = {
    "exact_tikhonov": {"inverse": BlockDiagonalInverse(tikhonov=ExactTikhonov())},
    "low_rank": {"inverse": BlockDiagonalInverse(low_rank=True)},
    "block_tridiagonal": {"inverse": BlockTridiagonalInverse()},
    "ekfac": {"inverse": "ekfac"},
    "refresh_under_way": {"intervals": Intervals(inverse_lag=3, inverse_interval=4)},
    "paper": kronfac.presets.paper(),
    "diagonal_block": {"blocks": kronfac.Blocks(dense_limit=0)},
    "dense_block": {"blocks": kronfac.Blocks(dense_limit=512)},
}


def advance(optimizer: KFAC, steps: range) -> None:
    for k in steps:
        optimizer.step(optimizer.closure(normal(9, 4, seed=k), normal(9, 3, seed=100 + k)))


def trained(steps: int = 6, **settings: Any) -> KFAC:
    model = Scaled() if "blocks" in settings else mlp([4, 5, 3], seed=3)
    optimizer = KFAC(model, LOSS, **settings)
    advance(optimizer, range(steps))
    return optimizer


def edited(state: Any, *path: Any, value: Any) -> Any:
    return changed(state, ("kfac", *path), value)


def refuses(optimizer: KFAC, state: Any, match: str = "") -> None:
    before = Snapshot.of(optimizer)
    with pytest.raises(StateError, match=match):
        optimizer.load_state_dict(state)
    before.assert_untouched(optimizer)


# -------------------------------------------------------------------------------------- every entry

NOT_CHECKED = {"candidates", "scales"}
"""Tuples of any numbers."""


def leaves(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every value that is read of a nested state, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            if path or key != "state":  # which shows the momentum that "kfac" has
                yield from leaves(item, (*path, key))
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            yield from leaves(item, (*path, index))
    else:
        yield path, value


def at(value: Any, path: Path) -> Any:
    return reduce(getitem, path, value)


def changed(value: Any, path: Path, new: Any) -> Any:
    """A copy with another value at the end of this path."""
    if not path:
        return new
    found = copy.copy(value)
    found[path[0]] = changed(value[path[0]], path[1:], new)
    return found


def without(value: Any, path: Path) -> Any:
    """A copy without the last key of this path."""
    fewer = copy.copy(at(value, path[:-1]))
    del fewer[path[-1]]
    return changed(value, path[:-1], fewer)


Damage = Callable[[Any], Iterator[tuple[Path, Any]]]


def each_leaf(fits: Callable[[Any], bool], damaged: Callable[[Any], Any]) -> Damage:
    """States in which one such leaf is damaged."""
    return lambda state: (
        (path, changed(state, path, damaged(leaf))) for path, leaf in leaves(state) if fits(leaf)
    )


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def missing_entries(state: Any) -> Iterator[tuple[Path, Any]]:
    yield ("state",), without(state, ("state",))
    for path, _ in leaves(state):
        if not NOT_CHECKED & {*path}:
            yield path, without(state, path)


def unknown_entries(state: Any) -> Iterator[tuple[Path, Any]]:
    parents = {path[:n] for path, _ in leaves(state) for n in range(len(path))}
    for path in parents:
        value = at(state, path)
        # Schedules and users may add options, and every kind of pass has an entry in "dims".
        free = "param_groups" in path or path[-1:] == ("dims",)
        if isinstance(value, dict) and not free:
            yield path, changed(state, path, value | {"surplus": 1.0})


EVERYWHERE: dict[str, Damage] = {
    "NaN": each_leaf(
        lambda leaf: is_tensor(leaf) and leaf.is_floating_point(),
        lambda leaf: torch.full_like(leaf, math.nan),
    ),
    "another shape": each_leaf(is_tensor, lambda leaf: leaf.new_zeros((*leaf.shape, 2))),
    "another dtype": each_leaf(is_tensor, lambda leaf: leaf.to(torch.float32)),
    "fewer dimensions": each_leaf(is_tensor, lambda leaf: leaf.sum()),
    "a missing entry": missing_entries,
    "an unknown entry": unknown_entries,
}


def accepted(optimizer: KFAC, damages: Iterator[tuple[Path, Any]]) -> list[Path]:
    """Damages that are not seen, of at least ten; those that are seen leave no trace."""
    before, found, refused = Snapshot.of(optimizer), [], 0
    for path, damaged in damages:
        try:
            optimizer.load_state_dict(damaged)
        except StateError:
            before.assert_untouched(optimizer)
            refused += 1
        else:
            found.append(path)
            optimizer.load_state_dict(before.state)
    assert refused >= 10
    return found


@pytest.mark.parametrize("damage", EVERYWHERE)
@pytest.mark.parametrize("case", SETTINGS)
def test_damage_is_seen_wherever_it_is(case, damage):
    settings = SETTINGS[case]
    state = trained(16 if case == "refresh_under_way" else 6, **settings).state_dict()
    kinds = [block["class"] for block in state["kfac"]["curvature"]["blocks"]]
    assert case != "refresh_under_way" or state["kfac"]["refresh"] is not None
    assert case != "diagonal_block" or "kronfac.DiagonalMoments" in kinds
    assert case != "dense_block" or "kronfac.DenseMoments" in kinds
    assert not accepted(trained(3, **settings), EVERYWHERE[damage](state))


def test_values_of_other_types_raise_state_errors_or_none():
    other_type = each_leaf(lambda leaf: True, lambda t: t.tolist() if is_tensor(t) else "damaged")
    accepted(trained(3, **SETTINGS["paper"]), other_type(trained(**SETTINGS["paper"]).state_dict()))


# ----------------------------------------------------------------------------------- numbers and kinds

NUMBERS: dict[str, tuple[Path, Any, str]] = {
    "generator": (("generator",), torch.zeros(7, dtype=torch.uint8), "generator"),
    "units twice": (("units",), ["0", "0"], r"\['0', '0'\]; this one has \['0', '2'\]"),
    "a class nobody knows": (("curvature", "class"), "Nobody", "'Nobody'.*import what defines it"),
    "another class": (
        ("damping", "class"),
        "kronfac.Failed",
        "incomplete: it has no \\['message'\\]",
    ),
    "another rule's memory": (
        ("damping",),
        {"class": "kronfac.GammaState", "gamma": 1.0},
        "GammaState where this KFAC has DampingState, and the two have nothing in common",
    ),
}


@pytest.mark.parametrize("number", NUMBERS)
def test_what_is_wrong_is_said(number):
    path, value, match = NUMBERS[number]
    state = trained(weight_decay=0.1).state_dict()
    refuses(trained(3), edited(state, *path, value=value), match)


@pytest.mark.parametrize("weight_decay", [-1.0, math.nan, math.inf, "0.1", None])
def test_a_weight_decay_that_is_none_is_refused(weight_decay):
    state = trained().state_dict()
    damaged = changed(state, ("param_groups", 0, "weight_decay"), weight_decay)
    refuses(trained(3), damaged, "weight_decay")


def test_a_moment_of_another_kind_is_refused():
    state = trained().state_dict()
    blocks = state["kfac"]["curvature"]["blocks"]
    grouped = {
        "class": "kronfac.GroupedKroneckerMoments",
        **dict.fromkeys("AG", torch.eye(5).double()[None]),
    }
    damaged = edited(state, "curvature", "blocks", value=[grouped, blocks[1]])
    refuses(trained(3), damaged, "'0' are GroupedKroneckerMoments; this KFAC has a KroneckerBlock")
    operator = edited(state, "current", "inverse", "pieces", 0, value=blocks[0])
    refuses(
        trained(3), operator, r"pieces\[0\] must be of type Operator or ChainOperator or Failed"
    )


def test_a_class_of_the_same_name_elsewhere_does_not_replace_the_librarys():
    class DiagonalMoments(kronfac.extend.Moments):
        """A user's own."""

    state = trained(**SETTINGS["diagonal_block"]).state_dict()
    optimizer = trained(0, **SETTINGS["diagonal_block"])
    optimizer.load_state_dict(state)
    kinds = {block["class"] for block in optimizer.state_dict()["kfac"]["curvature"]["blocks"]}
    assert kinds == {"kronfac.KroneckerMoments", "kronfac.DiagonalMoments"}


def test_a_tensor_in_two_places_stays_one():
    first, other = (trained(steps, **kronfac.presets.paper()) for steps in (6, 3))

    def tensors(optimizer: KFAC) -> list[Tensor]:
        """δ of the last step, by which it is rolled back, and which is the momentum too."""
        kfac = optimizer.state_dict()["kfac"]
        delta, momentum = kfac["acceptance"]["pending"]["delta"], kfac["step"]["momentum"]
        assert [*map(id, delta)] == [*map(id, momentum)]
        return delta

    saved = tensors(first)
    other.load_state_dict(first.state_dict())
    assert not {t.data_ptr() for t in saved} & {t.data_ptr() for t in tensors(other)}


# ------------------------------------------------------------------------------ other rules, other classes


def test_a_rule_goes_on_from_what_it_has_in_common_with_another():
    state = trained(weight_decay=0.1).state_dict()
    assert state["kfac"]["gamma"]["class"] == "kronfac.AdaptiveGammaState"
    searching = trained(
        3, gamma=kronfac.GammaSearch(interval=5), intervals=Intervals(inverse_interval=5)
    )
    searching.load_state_dict(state)
    common = {"class": "kronfac.GammaState", "gamma": state["kfac"]["gamma"]["gamma"]}
    assert searching.state_dict()["kfac"]["gamma"] == common
    adaptive = trained(3)
    adaptive.load_state_dict(searching.state_dict())
    assert adaptive.state_dict()["kfac"]["gamma"]["gamma"] == common["gamma"]
    advance(adaptive, range(6, 8))


def counting_rule() -> kronfac.FixedGamma:
    """A rule with a memory; each call defines it anew, as a notebook does."""

    @dataclass(frozen=True)
    class Counted(kronfac.extend.GammaState):
        refreshes: int = 0

    class Counting(kronfac.FixedGamma):
        def init(self, m: kronfac.extend.Measurement) -> Counted:
            return Counted(gamma=1.0)

        def update(self, state: Any, m: kronfac.extend.Measurement) -> Counted:
            return replace(state, refreshes=state.refreshes + len(m.candidates))

    return Counting()


def test_of_two_classes_with_one_name_the_rules_own_is_meant():
    first = trained(gamma=counting_rule())
    counting_rule()
    other = copy.copy(first)
    state = first.state_dict()
    assert other.state_dict()["kfac"]["gamma"] == state["kfac"]["gamma"]
    assert state["kfac"]["gamma"]["refreshes"] > 1


@dataclass(frozen=True)
class ScalarOperator(Storable):
    """A damped inverse without a word about shapes."""

    inverse: Tensor

    def mv(self, V: Tensor) -> Tensor:
        return V * self.inverse

    def to_dense(self) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class ScalarMoments(kronfac.extend.DiagonalMoments):
    """Statistics without a word about shapes; their mean counts."""

    def shapes(self, rows: int, columns: int) -> dict[str, Any]:
        return {}

    def damped(self, gamma: float, tikhonov: Any) -> Any:
        return ScalarOperator(1 / (self.D.mean() + gamma**2))


@dataclass(frozen=True)
class ScalarBlock(kronfac.extend.DiagonalBlock):
    moments = ScalarMoments

    def observe(self, taps: Any, weight: float) -> ScalarMoments:
        return ScalarMoments(super().observe(taps, weight).D)


def with_scalar_blocks(steps: int) -> KFAC:
    optimizer = KFAC(mlp([4, 5, 3], seed=3), LOSS)
    units = [replace(unit, block=ScalarBlock()) for unit in optimizer.network.units]
    optimizer.network = replace(optimizer.network, units=units)
    advance(optimizer, range(steps))
    return optimizer


def test_a_block_from_outside_is_saved_and_loaded_without_a_word_about_it():
    first, other = with_scalar_blocks(6), with_scalar_blocks(0)
    saved = through_a_file(contents(first))
    state = saved["optimizer"]
    other.model.load_state_dict(saved["model"])
    other.load_state_dict(state)
    for run in (first, other):
        advance(run, range(6, 9))
    assert same(other.state_dict(), first.state_dict())
    damaged = edited(state, "curvature", "blocks", 0, "D", value=torch.ones(24).double())
    refuses(other, damaged, "'0' are for 24 parameters; there are 25")
    for damage in ("NaN", "a missing entry"):
        assert not accepted(other, EVERYWHERE[damage](state))
