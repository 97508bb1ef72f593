"""Random problems: an error has its name, parameters stay finite, nothing is different without a word."""

import math
import random
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.errors import KronfacError
from tests.conftest import seeded
from tests.failures.injection import AtOperation, Everything, Injected
from tests.optimizer.runs import same

EXAMPLES = (1, 2, 3, 7)
SCALES = tuple(10.0**n for n in range(-30, 31, 5))
SPOILS = ("nothing", "nothing", "nan", "inf", "duplicates", "constant", "zeros", "low rank")


@dataclass(frozen=True)
class Problem:
    """A small network with data that may be anything."""

    layers: tuple[int, ...]
    activation: str
    norm: bool
    dropout: bool
    bias: bool
    classes: bool
    double: bool
    examples: int
    scales: tuple[float, float, float]
    """Scales of inputs, targets and weights."""
    spoil: str
    at: int
    """The step whose mini-batch is spoiled."""
    inverse: str
    decay: float
    way: str
    seed: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.double else torch.float32

    def model(self) -> nn.Module:
        torch.manual_seed(self.seed)
        modules: list[nn.Module] = []
        for n, (d_in, d_out) in enumerate(zip(self.layers, self.layers[1:], strict=False)):
            if n:
                modules.append(
                    {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}[self.activation]()
                )
            if n and self.norm:
                modules.append(nn.LayerNorm(d_in))
            if n and self.dropout:
                modules.append(nn.Dropout(0.3))
            modules.append(nn.Linear(d_in, d_out, bias=self.bias))
        model = nn.Sequential(*modules).to(self.dtype)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(self.scales[2])
        return model

    def data(self, step: int) -> tuple[Tensor, Tensor]:
        made = seeded(1000 * self.seed + step)
        x = torch.randn(self.examples, self.layers[0], generator=made) * self.scales[0]
        y = torch.randn(self.examples, self.layers[-1], generator=made) * self.scales[1]
        if step == self.at:
            x = self._spoiled(x)
        if self.classes:
            return x.to(self.dtype), y.argmax(dim=1)
        return x.to(self.dtype), y.to(self.dtype)

    def _spoiled(self, x: Tensor) -> Tensor:
        if self.spoil in ("nan", "inf"):
            x[0, 0] = float(self.spoil)
        elif self.spoil == "duplicates":
            x[:] = x[:1].clone()
        elif self.spoil == "constant":
            x[:] = 1.0
        elif self.spoil == "zeros":
            x[:] = 0.0
        elif self.spoil == "low rank":
            x[:] = x[:, :1].clone()
        return x

    def loss(self) -> nn.Module:
        return nn.CrossEntropyLoss() if self.classes else nn.MSELoss()


class Training:
    """A run on a problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.optimizer = KFAC(
            problem.model(), problem.loss(), inverse=problem.inverse, weight_decay=problem.decay
        )
        torch.manual_seed(problem.seed)

    def begin(self, k: int) -> None:
        if self.problem.way == "loop":
            x, y = self.problem.data(k)
            self.optimizer.zero_grad()
            self.optimizer.objective.module(self.optimizer.model(x), y).backward()

    def step(self, k: int) -> None:
        x, y = self.problem.data(k)
        optimizer = self.optimizer

        def closure() -> Tensor:
            optimizer.zero_grad()
            value: Tensor = optimizer.objective.module(optimizer.model(x), y)
            value.backward()
            return value

        ways = {"closure": closure, "own": optimizer.closure(x, y), "loop": None}
        optimizer.step(ways[self.problem.way])

    def everything(self) -> tuple[Any, ...]:
        return self.optimizer.state_dict(), dict(self.optimizer.model.state_dict())


problems = st.builds(
    Problem,
    layers=st.lists(st.integers(1, 5), min_size=2, max_size=4).map(tuple),
    activation=st.sampled_from(["relu", "tanh", "gelu"]),
    norm=st.booleans(),
    dropout=st.booleans(),
    bias=st.booleans(),
    classes=st.booleans(),
    double=st.booleans(),
    examples=st.sampled_from(EXAMPLES),
    scales=st.tuples(
        *([st.one_of(st.just(1.0), st.sampled_from(SCALES))] * 2),
        st.sampled_from([1.0, 1.0, 1.0, 1e-30, 1e-10, 1e5, 1e15, 1e30]),
    ),
    spoil=st.sampled_from(SPOILS),
    at=st.integers(0, 3),
    inverse=st.sampled_from(["block_diagonal", "block_tridiagonal", "ekfac"]),
    decay=st.sampled_from([0.0, 1e-3]),
    way=st.sampled_from(["own", "closure", "loop"]),
    seed=st.integers(0, 10_000),
)


def check(problem: Problem, interrupted: int, where: float) -> None:
    """Four steps, one of which is interrupted; beside them a run that is not."""
    training, untroubled = Training(problem), Training(problem)
    chosen = random.Random(f"{problem.seed} {where}")
    for k in range(4):
        try:
            _one(untroubled, k)
        except KronfacError:
            before = Everything.of(training.optimizer)
            start = torch.get_rng_state()
            with pytest.raises(KronfacError):
                _one(training, k)
            torch.set_rng_state(start)
            before.assert_kept(training.optimizer)
            return
        after = torch.get_rng_state()
        torch.set_rng_state(untroubled.started)  # type: ignore[attr-defined]
        training.begin(k)
        if k == interrupted:
            before = Everything.of(training.optimizer, gradients=problem.way == "loop")
            n = chosen.randint(1, 150)
            try:
                with AtOperation(n):
                    training.step(k)
            except Injected:
                before.assert_kept(training.optimizer)
                training.step(k)
        else:
            training.step(k)
        assert torch.equal(torch.get_rng_state(), after)
        assert same(training.everything(), untroubled.everything())
        report = training.optimizer.report
        assert report is not None
        finite = all(bool(p.isfinite().all()) for p in training.optimizer.model.parameters())
        assert finite, f"a parameter is not finite after {report}"
        if not math.isfinite(report.loss):
            assert report.refused or report.rejected
        if report.refused:
            assert report.events[-2].kind.startswith("nonfinite_") or report.rejected


def _one(training: Training, k: int) -> None:
    training.started = torch.get_rng_state()  # type: ignore[attr-defined]
    training.begin(k)
    training.step(k)


cases = given(problems, st.integers(0, 3), st.floats(0, 1))


def _quietly(problem: Problem, interrupted: int, where: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # many of these problems deserve one
        check(problem, interrupted, where)


@cases
@settings(max_examples=60)
def test_any_problem(problem, interrupted, where):
    _quietly(problem, interrupted, where)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
@settings(max_examples=1000)
@given(data=st.data())
def test_many_problems(part, data):
    seeds = st.integers(10_001 * (part + 1), 10_001 * (part + 1) + 10_000)
    problem = data.draw(problems)
    seeded_problem = Problem(**{**vars(problem), "seed": data.draw(seeds)})
    _quietly(seeded_problem, data.draw(st.integers(0, 3)), data.draw(st.floats(0, 1)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_refused(dtype):
    with pytest.raises(KronfacError, match="float32 or float64"):
        KFAC(nn.Linear(3, 2).to(dtype), nn.MSELoss())
