"""Saving, loading and copying: a run that was interrupted is the run that was not, to the bit."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, AdaptiveBatchSampler
from kronfac.errors import StateError
from kronfac.extend import BlockDiagonalInverse, BlockTridiagonalInverse, ExactTikhonov
from kronfac.storage import tensors_in
from tests.conftest import mlp, normal
from tests.optimizer.resume import (
    CASES,
    DTYPES,
    LAST,
    SAVED_AT,
    advance,
    contents,
    new_run,
    through_a_file,
)
from tests.optimizer.runs import Snapshot, same

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def continued(tmp_path_factory):
    """Every case saved at step 6 here and continued in one other process."""
    directory = tmp_path_factory.mktemp("resume")
    for case in CASES:
        for dtype in DTYPES:
            optimizer = new_run(case, dtype)
            advance(optimizer, case, SAVED_AT)
            torch.save(contents(optimizer), directory / f"{case}-{dtype}.saved")
    command = [sys.executable, "-m", "tests.optimizer.resume", str(directory)]
    subprocess.run(command, cwd=ROOT, check=True)
    return directory


each_run = pytest.mark.parametrize(
    ("case", "dtype"), [(case, dtype) for case in CASES for dtype in DTYPES]
)


@each_run
def test_continued_in_a_new_process_it_equals_the_uninterrupted_run(continued, case, dtype):
    optimizer = new_run(case, dtype)
    advance(optimizer, case, LAST)
    resumed = torch.load(continued / f"{case}-{dtype}.continued", weights_only=True)
    uninterrupted = contents(optimizer)
    assert same(dict(resumed["model"]), dict(uninterrupted["model"]))
    for key, value in uninterrupted["optimizer"]["kfac"].items():
        assert same(resumed["optimizer"]["kfac"][key], value), key
    assert same(resumed["optimizer"], uninterrupted["optimizer"])


def layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.data_ptr() % 64


@each_run
def test_a_loaded_state_equals_the_one_that_was_saved(case, dtype):
    """Also its layout in memory: on other machines other products round by alignment."""
    optimizer, other = (new_run(case, dtype) for _ in range(2))
    advance(optimizer, case, SAVED_AT)
    saved = optimizer.state_dict()
    other.load_state_dict(through_a_file(saved))
    loaded = other.state_dict()
    assert same(loaded, saved)
    assert loaded["kfac"]["generator"].dtype == torch.uint8
    assert {t.dtype for t in tensors_in(loaded)} == {DTYPES[dtype], torch.uint8}
    assert isinstance(loaded["kfac"]["damping"]["lambda_"], float)
    assert [*map(layout, tensors_in(loaded))] == [*map(layout, tensors_in(saved))]


def test_the_inverse_in_the_file_is_older_than_its_statistics(continued):
    # Else the runs above would not show that it is carried over rather than computed again.
    saved = torch.load(continued / "block_diagonal-float64.saved", weights_only=True)
    kfac = saved["optimizer"]["kfac"]
    A = kfac["curvature"]["blocks"][0]["A"]
    damping = torch.linalg.inv(kfac["current"]["inverse"]["pieces"][0]["A"]) - A
    off_diagonal = damping - torch.diag(damping.diagonal())
    assert off_diagonal.abs().max() > 1e-3 * A.diagonal().mean()


def test_a_saved_state_does_not_follow_the_optimizer():
    optimizer = new_run("decomposition", "float64")
    advance(optimizer, "decomposition", 2)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    advance(optimizer, "decomposition", 5)
    assert same(saved, kept)

    optimizer.load_state_dict(saved)
    advance(optimizer, "decomposition", 5)
    assert same(saved, kept)


def through_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("way", [copy.copy, copy.deepcopy, through_pickle])
@pytest.mark.parametrize(("case", "steps"), [("adaptive", 0), *((case, 6) for case in CASES)])
def test_a_copy_goes_on_as_the_original(case, steps, way):
    """Of the same model if it is shallow, else of the model that is copied along."""
    optimizer = new_run(case, "float64")
    optimizer.param_groups[0] |= {"weight_decay": 0.25, "name": "all"}
    advance(optimizer, case, steps)
    model, other = optimizer.model, copy.copy(optimizer)
    if way is not copy.copy:
        model, other = way((optimizer.model, optimizer))
    assert other.model is model
    assert (other.report, other.settings) == (optimizer.report, optimizer.settings)
    assert other.defaults == optimizer.defaults
    for name in ("weight_decay", "name"):
        assert other.param_groups[0][name] == optimizer.param_groups[0][name]
    before = copy.deepcopy(contents(optimizer))
    advance(other, case, steps + 3)
    expected = copy.deepcopy(contents(other))
    assert same(optimizer.state_dict(), before["optimizer"])
    optimizer.model.load_state_dict(before["model"])
    advance(optimizer, case, steps + 3)
    assert same(contents(optimizer), expected)


HOLDERS: dict[str, Callable[[KFAC], Any]] = {
    "the model": lambda optimizer: optimizer.model,
    "a layer": lambda optimizer: optimizer.model[0],
    "a container": lambda optimizer: nn.Sequential(optimizer.model),
    "the optimizer's own model": lambda optimizer: optimizer,
}


@pytest.mark.parametrize("way", [copy.deepcopy, through_pickle])
@pytest.mark.parametrize("place", HOLDERS)
def test_a_module_that_holds_its_own_optimizer_is_copied_with_it(place, way):
    optimizer = new_run("adaptive", "float64")
    advance(optimizer, "adaptive", 6)
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
        advance(run, "adaptive", 9)
    assert same(contents(other), contents(optimizer))


def test_with_a_sampler_too():
    x, y = normal(400, 8), normal(400, 3, seed=1)
    optimizer = KFAC(mlp([8, 12, 3], seed=3), nn.MSELoss(), weight_decay=0.1)
    sampler = AdaptiveBatchSampler(len(x), optimizer, initial=20)

    def sizes(optimizer: KFAC, sampler: AdaptiveBatchSampler, steps: int) -> list[int]:
        drawn = [sampler.next_indices()]
        for _ in range(steps):
            optimizer.step(optimizer.closure(x[drawn[-1]], y[drawn[-1]]))
            sampler.state_dict()  # looks at the report
            drawn.append(sampler.next_indices())
        return [len(rows) for rows in drawn]

    sizes(optimizer, sampler, 11)
    copies = copy.deepcopy((optimizer, sampler))
    assert copies[0].param_groups[0]["weight_decay"] == copies[0].defaults["weight_decay"] == 0.1
    expected = sizes(optimizer, sampler, 30)
    assert len(set(expected)) > 2, "else they would say nothing"
    assert sizes(*copies, 30) == expected


def test_a_state_from_before_the_first_step():
    optimizer, other, third = (new_run("decomposition", "float64") for _ in range(3))
    third.param_groups[0]["weight_decay"] = other.param_groups[0]["weight_decay"] = 0.25
    saved = third.state_dict()
    optimizer.load_state_dict(through_a_file(saved))
    for run in (optimizer, other):
        advance(run, "decomposition", 4)
    assert same(optimizer.state_dict(), other.state_dict())
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


# --------------------------------------------------------------------------- states that do not fit


def _trained(
    model: nn.Module | None = None, dtype: torch.dtype = torch.float64, **settings: Any
) -> KFAC:
    model = mlp([4, 5, 3], seed=3, dtype=dtype) if model is None else model
    optimizer = KFAC(model, nn.MSELoss(), weight_decay=0.01, **settings)
    dtype = next(model.parameters()).dtype
    x, y = normal(9, 4, dtype=dtype), normal(9, 3, seed=1, dtype=dtype)
    for _ in range(2):
        optimizer.step(optimizer.closure(x, y))
    return optimizer


def _edited(state: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return state | {"kfac": state["kfac"] | changes}


def _transposed(state: dict[str, Any]) -> dict[str, Any]:
    """The same number of parameters in every layer, in another shape."""
    curvature = state["kfac"]["curvature"]
    blocks = [block | {"A": block["G"], "G": block["A"]} for block in curvature["blocks"]]
    return _edited(state, curvature=curvature | {"blocks": blocks})


def _named(*names: str) -> nn.Sequential:
    """4-5-3 with these names for its layers."""
    first, activation, second = mlp([4, 5, 3], seed=3)
    model = nn.Sequential()
    for name, module in zip((names[0], "tanh", names[1]), (first, activation, second), strict=True):
        model.add_module(name, module)
    return model


UNFIT = {
    "not a dict": (lambda: ["kfac"], "not the state_dict of a KFAC"),
    "another optimizer's": (
        lambda: torch.optim.Adam(mlp([4, 5, 3]).parameters()).state_dict(),
        "no entry 'kfac'",
    ),
    "another version": (
        lambda: _edited(_trained().state_dict(), version=6),
        "reads states of version 1; got version 6",
    ),
    "other layers": (lambda: _trained(_named("a", "b")).state_dict(), r"\['a', 'b'\]"),
    "more layers": (lambda: _trained(mlp([4, 5, 5, 3])).state_dict(), r"\['0', '2', '4'\]"),
    "other widths": (lambda: _trained(mlp([4, 6, 3])).state_dict(), r"'0'.*\(6, 5\).*\(5, 5\)"),
    "rows and columns exchanged": (
        lambda: _transposed(_trained().state_dict()),
        r"'2'.*must be \(6, 6\)",
    ),
    "other inverse": (
        lambda: _trained(inverse=BlockTridiagonalInverse).state_dict(),
        "saved with BlockTridiagonalInverse",
    ),
    "other damping form": (
        lambda: _trained(inverse=BlockDiagonalInverse(tikhonov=ExactTikhonov())).state_dict(),
        "ExactTikhonov",
    ),
    "nothing inside": (lambda: {"kfac": None, "weight_decay": 0.0}, "state"),
}


@pytest.mark.parametrize("unfit", UNFIT)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(unfit):
    make, message = UNFIT[unfit]
    state = make()
    optimizer = _trained()
    before = Snapshot.of(optimizer)
    with pytest.raises(StateError, match=message):
        optimizer.load_state_dict(state)
    before.assert_untouched(optimizer)


class ClassToken(nn.Module):
    """A parameter before every sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.ones(1, 1, 3))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        sequences = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        z: Tensor = self.head(sequences.mean(dim=1))
        return z


def test_units_whose_uses_were_not_seen_are_saved_as_such():
    """The kind of use that the first pass has shown is none that its block is for."""
    optimizer, other = (KFAC(ClassToken(), nn.MSELoss()) for _ in range(2))
    with pytest.warns(UserWarning, match="does not see all uses of 'token'"):
        optimizer.step(optimizer.closure(normal(3, 4, 3).float(), normal(3, 2).float(), chunk=2))
    saved = optimizer.state_dict()
    other.load_state_dict(saved)
    assert same(other.state_dict(), saved)
