"""States that were damaged, or made by hand: refused with what is wrong, and nothing is touched."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

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
}
STEPS = {"refresh_under_way": 16}


def advance(optimizer: KFAC, steps: range) -> None:
    for k in steps:
        optimizer.step(optimizer.closure(normal(9, 4, seed=k), normal(9, 3, seed=100 + k)))


def trained(steps: int = 6, model: nn.Module | None = None, **settings: Any) -> KFAC:
    optimizer = KFAC(mlp([4, 5, 3], seed=3) if model is None else model, LOSS, **settings)
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


Damage = Callable[[Any], Iterator[tuple[Path, Any]]]


def each_leaf(fits: Callable[[Any], bool], damaged: Callable[[Any], Any]) -> Damage:
    """States in which one such leaf is damaged."""
    return lambda state: (
        (path, changed(state, path, damaged(leaf))) for path, leaf in leaves(state) if fits(leaf)
    )


def is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def missing_entries(state: Any) -> Iterator[tuple[Path, Any]]:
    for path, _ in leaves(state):
        if "candidates" not in path:  # of which there may be any number
            yield path, without(state, path)


def unknown_entries(state: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    value = state
    for key in path:
        value = value[key]
    if isinstance(value, dict):
        if "param_groups" not in path:  # which may hold what schedules and users put there
            yield path, changed(state, path, value | {"unknown": 1.0})
        for key in value:
            yield from unknown_entries(state, (*path, key))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield from unknown_entries(state, (*path, index))


EVERYWHERE: dict[str, Damage] = {
    "NaN": each_leaf(
        lambda leaf: is_tensor(leaf) and leaf.is_floating_point(),
        lambda leaf: torch.full_like(leaf, math.nan),
    ),
    "another shape": each_leaf(is_tensor, lambda leaf: leaf.new_zeros((*leaf.shape, 2))),
    "another type": each_leaf(
        lambda leaf: True, lambda leaf: leaf.tolist() if is_tensor(leaf) else "damaged"
    ),
    "another dtype": each_leaf(is_tensor, lambda leaf: leaf.to(torch.float32)),
    "fewer dimensions": each_leaf(is_tensor, lambda leaf: leaf.sum()),
    "a missing entry": missing_entries,
    "an unknown entry": unknown_entries,
}


def all_accepted(optimizer: KFAC, damage: str, state: Any) -> list[Path]:
    """The damages that are not seen, of at least one."""
    before, accepted, count = Snapshot.of(optimizer), [], 0
    for path, damaged in EVERYWHERE[damage](state):
        count += 1
        try:
            optimizer.load_state_dict(damaged)
        except StateError:
            before.assert_untouched(optimizer)
        else:
            accepted.append(path)
            optimizer.load_state_dict(before.state)
    assert count > 0
    return accepted


@pytest.mark.parametrize("damage", EVERYWHERE)
@pytest.mark.parametrize("case", SETTINGS)
def test_damage_is_seen_wherever_it_is(case, damage):
    settings, steps = SETTINGS[case], STEPS.get(case, 6)
    state = trained(steps, **settings).state_dict()
    if case == "refresh_under_way":
        assert state["kfac"]["refresh"] is not None
    assert not all_accepted(trained(3, **settings), damage, state)


@pytest.mark.parametrize("damage", [*EVERYWHERE][:-1])
@pytest.mark.parametrize(
    ("limit", "kind"), [(0, "kronfac.DiagonalMoments"), (512, "kronfac.DenseMoments")]
)
def test_damage_is_seen_in_other_blocks(limit, kind, damage):
    settings = {"model": Scaled(), "blocks": kronfac.Blocks(dense_limit=limit)}
    state = trained(**settings).state_dict()
    assert kind in [block["class"] for block in state["kfac"]["curvature"]["blocks"]]
    assert not all_accepted(trained(3, **settings | {"model": Scaled()}), damage, state)


# ----------------------------------------------------------------------------------- numbers and kinds

NUMBERS: dict[str, tuple[Path, Any, str]] = {
    "iteration's type": (("iteration",), True, "iteration must be of type int; got True"),
    "generator": (("generator",), torch.zeros(7, dtype=torch.uint8), "generator"),
    "units twice": (("units",), ["0", "0"], r"\['0', '0'\]; this one has \['0', '2'\]"),
    "a class nobody knows": (("curvature", "class"), "Nobody", "'Nobody'.*import what defines it"),
    "another class": (
        ("damping", "class"),
        "kronfac.Failed",
        "incomplete: it has no \\['message'\\]",
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


def test_what_has_no_limit_may_be_infinite():
    state = trained(weight_decay=0.1).state_dict()
    for path in (("step", "memory", "length"), ("curvature", "examples")):
        state = edited(state, *path, value=math.inf)
    optimizer = trained(3)
    optimizer.load_state_dict(state)
    assert same(optimizer.state_dict(), state)


def test_a_class_of_the_same_name_elsewhere_does_not_replace_the_librarys():
    class DiagonalMoments(kronfac.extend.Moments):
        """A user's own."""

    settings = {"model": Scaled(), "blocks": kronfac.Blocks(dense_limit=0)}
    state = trained(**settings).state_dict()
    optimizer = trained(0, **settings)
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


def counting_rule() -> kronfac.extend.GammaRule[Any]:
    """A rule with a memory; each call defines it anew, as a notebook does."""

    @dataclass(frozen=True)
    class Counted(kronfac.extend.GammaState):
        refreshes: int = 0

    @dataclass(frozen=True)
    class Counting(kronfac.extend.GammaRule[Counted]):
        def init(self, m: kronfac.extend.Measurement) -> Counted:
            return Counted(gamma=1.0)

        def candidates(self, state: Counted, m: kronfac.extend.Measurement) -> tuple[float, ...]:
            return (1.0 / (1 + state.refreshes),)

        def update(self, state: Counted, m: kronfac.extend.Measurement) -> Counted:
            return replace(state, gamma=m.gamma, refreshes=state.refreshes + len(m.candidates))

    return Counting()


def test_of_two_classes_with_one_name_the_rules_own_is_meant():
    first = trained(gamma=counting_rule())
    counting_rule()
    other = copy.copy(first)
    state = first.state_dict()
    assert other.state_dict()["kfac"]["gamma"] == state["kfac"]["gamma"]
    assert state["kfac"]["gamma"]["refreshes"] > 1
    damaged = edited(state, "gamma", "refreshes", value=0.5)
    refuses(other, damaged, "refreshes must be of type int; got 0.5")


@dataclass(frozen=True)
class ScalarOperator(Storable):
    """A damped inverse without a word about shapes."""

    inverse: Tensor

    def mv(self, V: Tensor) -> Tensor:
        return V * self.inverse

    def to_dense(self) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class ScalarMoments(kronfac.extend.Moments):
    """The mean curvature of a unit."""

    mean: Tensor
    count: int

    def damped(self, gamma: float, tikhonov: Any) -> ScalarOperator:
        return ScalarOperator(1 / (self.mean + gamma**2))

    def trace(self) -> Tensor:
        return self.mean * self.count

    def dense(self) -> Tensor:
        return self.mean * torch.eye(self.count, dtype=self.mean.dtype)

    @property
    def size(self) -> int:
        return self.count

    def probe(self) -> list[Tensor]:
        return [self.mean]


class ScalarAverage:
    def __init__(self, old: ScalarMoments | None, decay: float) -> None:
        self.old, self.decay, self.sum, self.count = old, 0.0 if old is None else decay, 0.0, 0

    def add(self, taps: Any, each: float, weight: float) -> None:
        total = sum(tap.gradients() for tap in taps)
        self.count = total[0].numel()
        self.sum = self.sum + total.square().sum() * weight / self.count

    def value(self) -> ScalarMoments:
        old = 0.0 if self.old is None else self.old.mean * self.decay
        return ScalarMoments(old + (1 - self.decay) * self.sum, self.count)


@dataclass(frozen=True)
class ScalarBlock(kronfac.extend.Block):
    moments: ClassVar[type[kronfac.extend.Moments]] = ScalarMoments

    def observe(self, taps: Any, weight: float) -> ScalarMoments:
        average = ScalarAverage(None, 0.0)
        average.add(taps, 1.0, weight)
        return average.value()

    def average(self, old: Any, decay: float) -> ScalarAverage:
        return ScalarAverage(old, decay)


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
    damaged = edited(state, "curvature", "blocks", 0, "count", value=24)
    refuses(other, damaged, "'0' are for 24 parameters; there are 25")
    for damage in ("NaN", "another type", "a missing entry"):
        assert not all_accepted(other, damage, state)
