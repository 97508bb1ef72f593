"""Random problems: an error has its name, parameters stay finite, nothing is different without a word."""

import copy
import io
import math
import signal
import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.errors import KronfacError
from tests.failures.fuzz_problems import Problem, problems
from tests.failures.injection import AtOperation, Everything, Injected, SignalAtLine, raising
from tests.optimizer.runs import same


class Training:
    """A run on a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.optimizer = problem.optimizer()
        torch.manual_seed(problem.seed)

    def begin(self, k: int) -> None:
        """What a loop does before the step."""
        if self.problem.way.startswith("loop"):
            self.optimizer.zero_grad()
            loop(self.problem, self.optimizer.model, self.optimizer.objective.module, k)

    def step(self, k: int) -> None:
        x, y = self.problem.data(k)
        optimizer = self.optimizer

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = self.problem.value(optimizer.model, optimizer.objective.module, x, y)
            value.backward()
            return value

        ways = {
            "own": lambda: optimizer.closure(x, y),
            "own in chunks": lambda: optimizer.closure(x, y, chunk=2),
            "closure": lambda: closure,
        }
        way = ways.get(self.problem.way)
        optimizer.step(way and way())

    def both(self, k: int) -> None:
        self.begin(k)
        self.step(k)

    def everything(self) -> tuple[Any, ...]:
        return self.optimizer.state_dict(), dict(self.optimizer.model.state_dict())

    def kept(self) -> Everything:
        """What an exception in the next step may not change."""
        return Everything.of(self.optimizer, gradients=self.problem.way.startswith("loop"))

    def resumed(self) -> "Training":
        """Another one, that has been saved and loaded."""
        file, random = io.BytesIO(), torch.get_rng_state()
        torch.save(self.everything(), file)
        file.seek(0)
        state, model = torch.load(file, weights_only=True)
        other = Training(self.problem)
        other.optimizer.model.load_state_dict(model)
        other.optimizer.load_state_dict(state)
        torch.set_rng_state(random)
        return other

    def copied(self) -> "Training":
        """One with a deep copy of the optimizer, which has a model of its own."""
        other = copy.copy(self)
        other.optimizer = copy.deepcopy(self.optimizer)
        return other


def loop(problem: Problem, model: nn.Module, loss: nn.Module, k: int) -> None:
    """Passes and gradients of a loop."""
    x, y = problem.data(k)
    size = len(x)
    if problem.way == "own in chunks":
        size = 2
    elif problem.way == "loop of two":
        size = max(1, math.ceil(size / 2))
    for x_part, y_part in zip(x.split(size), y.split(size), strict=True):
        value = problem.value(model, loss, x_part, y_part)
        (value * (len(x_part) / len(x))).backward()


def torch_alone(training: Training, k: int) -> BaseException | None:
    """The error that torch raises by itself, without an optimizer, from this point on."""
    random = torch.get_rng_state()
    model = training.problem.model()
    model.load_state_dict(training.optimizer.model.state_dict())
    torch.set_rng_state(random)  # for the dropout masks of the run
    try:
        loop(training.problem, model, training.optimizer.objective.module, k)
    except Exception as error:
        return error
    return None


@dataclass(frozen=True)
class Disturbance:
    """What one run goes through and the other does not."""

    kind: str
    """An exception at an `"operation"`, a signal at a `"line"`, or it is `"resumed"` or `"copied"`."""
    at: int
    """The step."""
    where: float
    """The place in the step, as a fraction of the operations or lines."""
    further: int
    """Steps after it."""

    def go_on(self, training: Training, k: int) -> Training:
        """The run, or what takes its place, after the disturbance and the step."""
        if self.kind in ("resumed", "copied"):
            training = getattr(training, self.kind)()
            training.both(k)
        else:
            count = self.count(training, k)
            training.begin(k)
            self.interrupted_step(training, k, count)
        return training

    def count(self, training: Training, k: int) -> int:
        """The number of places in a step, by a copy that takes it.

        Not by the undisturbed run: autograd adds up gradients in another order when operations are watched.
        """
        copied = training.copied()
        random = torch.get_rng_state()
        copied.begin(k)
        with AtOperation() if self.kind == "operation" else SignalAtLine() as counter:
            copied.step(k)
        torch.set_rng_state(random)
        return counter.count

    def interrupted_step(self, training: Training, k: int, count: int) -> None:
        """A step that is interrupted, and then repeated."""
        n, before = 1 + int(self.where * count), training.kept()
        try:
            if self.kind == "operation":
                with AtOperation(n):
                    training.step(k)
            else:
                with raising(signal.SIGINT, Injected) as ignored, SignalAtLine(n):
                    training.step(k)
                    assert ignored, f"the signal at line {n} of {count} raised nothing"
        except Injected:
            if training.optimizer.report is not before.report:  # it came after the step
                assert self.kind == "line"
                assert n > count - 30, f"the step was taken, and line {n} of {count} interrupted it"
                return
            before.assert_kept(training.optimizer)
            training.step(k)
        else:
            assert self.kind == "line", f"operation {n} of {count} raised nothing"


def check(problem: Problem, disturbance: Disturbance) -> None:
    """A few steps, one of which is disturbed; beside them a run that is not."""
    try:
        training = Training(problem)
    except KronfacError:
        return
    undisturbed = Training(problem)
    for k in range(disturbance.at + 1 + disturbance.further):
        start = torch.get_rng_state()
        try:
            undisturbed.both(k)
        except Exception as error:
            torch.set_rng_state(start)
            assert_raises_too(error, training, k)
            return
        after = torch.get_rng_state()
        torch.set_rng_state(start)
        if k == disturbance.at:
            training = disturbance.go_on(training, k)
        else:
            training.both(k)
        assert torch.equal(torch.get_rng_state(), after), "other random numbers were drawn"
        assert same(training.everything(), undisturbed.everything())
        assert_sound(training.optimizer)


def assert_raises_too(error: Exception, training: Training, k: int) -> None:
    """The other run fails alike, with an error of K-FAC's or the one that torch raises anyway."""
    if not isinstance(error, KronfacError):
        random = torch.get_rng_state()
        alone = torch_alone(training, k)
        torch.set_rng_state(random)
        if type(alone) is not type(error):
            raise error
    try:
        training.begin(k)
    except type(error):
        return
    before = training.kept()
    with pytest.raises(type(error)):
        training.step(k)
    before.assert_kept(training.optimizer)


def assert_sound(optimizer: KFAC) -> None:
    """Parameters are finite, and a report that says otherwise of a number says what was done about it."""
    report = optimizer.report
    assert report is not None
    finite = all(bool(p.isfinite().all()) for p in optimizer.model.parameters())
    assert finite, f"a parameter is not finite after {report}"
    if not math.isfinite(report.loss):
        assert report.refused or report.rejected
    if report.refused:
        assert report.events[-2].kind.startswith("nonfinite_") or report.rejected


kinds = ["operation"] * 4 + ["line", "resumed", "resumed", "copied"]
disturbances = st.builds(
    Disturbance,
    kind=st.sampled_from(kinds),
    at=st.sampled_from([0, 1, 1, 2]),
    where=st.integers(0, 9999).map(lambda n: n / 10_000),
    further=st.integers(0, 1),
)


def _quietly(problem: Problem, disturbance: Disturbance) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # many of these problems deserve one
        check(problem, disturbance)


@given(problems, disturbances)
@settings(max_examples=60)
def test_any_problem(problem, disturbance):
    _quietly(problem, disturbance)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(100))
@given(problem=problems, disturbance=disturbances)
@settings(max_examples=100)
def test_many_problems(part, problem, disturbance):
    _quietly(replace(problem, seed=problem.seed + 1_000_001 * part), disturbance)
