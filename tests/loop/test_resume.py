"""A run that is resumed after k steps equals the uninterrupted one to the bit, by a closure or a loop."""

import copy
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from tests.loop.loops import PROBLEMS, Problem
from tests.optimizer.runs import same

STEPS = 5
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .* gradient is 0.5 times",
    "ignore:The closure returned a loss of",
    "ignore:The .* left no gradient in 'mix'",
    "ignore:KFAC rejected",
)


class Sometimes(nn.Module):
    """A matrix of its own that some mini-batches use: the first one has it, or has it not."""

    def __init__(self, positive: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.mix = nn.Parameter(torch.randn(4, 4) / 2)
        self.positive = positive

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        h = h @ self.mix if bool(x[0, 0] > 0) is self.positive else h
        z: Tensor = self.last(h)
        return z


class Residual(nn.Module):
    """One output for every example, so that J is a matrix once J v has been compared."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        z: Tensor = self.last(h + torch.tanh(self.second(h)))
        return z


def classes(make: Callable[[], nn.Module]) -> Problem:
    return Problem(
        make,
        nn.CrossEntropyLoss(),
        lambda: torch.randn(64, 5),
        lambda: torch.randint(3, (64,)),
    )


NETWORKS = PROBLEMS | {
    "matrix in some": classes(lambda: Sometimes(True)),
    "matrix in others": classes(lambda: Sometimes(False)),
    "residual": Problem(
        Residual, nn.MSELoss(), lambda: torch.randn(64, 5), lambda: torch.randn(64, 1)
    ),
}


@dataclass(frozen=True)
class Way:
    """How a loop is written."""

    closure: bool = False
    clip: float | None = None
    factor: float = 1.0
    """What all gradients are multiplied by before the step."""
    micro_batches: int = 1
    scheduled: bool = False
    to_none: bool = True


class Run:
    """A model in training, and what a script saves of it."""

    def __init__(self, name: str, way: Way, **settings: Any) -> None:
        self.problem, self.way = NETWORKS[name], way
        self.model = self.problem.model()
        self.optimizer = KFAC(self.model, self.problem.loss_fn, **settings)
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: min(1.0, k / 2))
            for _ in range(way.scheduled)
        ]

    def _gradients(self, x: Tensor, y: Tensor) -> Tensor:
        total = torch.zeros(())
        count = self.way.micro_batches
        for some, targets in zip(x.chunk(count), y.chunk(count), strict=True):
            loss = self.problem.loss(self.model, some, targets) / count
            loss.backward()
            total = total + loss.detach()
        for p in self.model.parameters():
            if p.grad is not None and self.way.factor != 1:
                p.grad.mul_(self.way.factor)
        if self.way.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.way.clip)
        return total

    def step(self, x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            self.optimizer.zero_grad(set_to_none=self.way.to_none)
            return self._gradients(x, y)

        if self.way.closure:
            self.optimizer.step(closure)
        else:
            closure()
            self.optimizer.step()
        for schedule in self.schedules:
            schedule.step()

    def advance(self, steps: range) -> None:
        for x, y in (self.problem.batches(STEPS)[k] for k in steps):
            torch.manual_seed(len(x))  # for dropout; `batches` has set the generator
            self.step(x, y)

    def contents(self) -> dict[str, Any]:
        return {
            "model": dict(self.model.state_dict()),
            "optimizer": self.optimizer.state_dict(),
            "schedules": [schedule.state_dict() for schedule in self.schedules],
        }

    def load(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        for schedule, state in zip(self.schedules, saved["schedules"], strict=True):
            schedule.load_state_dict(state)


def resumes(name: str, way: Way, **settings: Any) -> None:
    """Save after every step of a run, and resume from there."""
    whole, files = Run(name, way, **settings), []
    for k in range(STEPS):
        file = io.BytesIO()
        torch.save(whole.contents(), file)
        files.append(file)
        whole.advance(range(k, k + 1))
    expected = whole.contents()
    for k, file in enumerate(files):
        file.seek(0)
        resumed = Run(name, way, **settings)
        resumed.load(torch.load(file, weights_only=True))
        resumed.advance(range(k, STEPS))
        assert same(resumed.contents(), expected), f"resumed after {k} steps"


@pytest.mark.parametrize("closure", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_resumed_after_any_step_it_equals_the_uninterrupted_run(name: str, closure: bool) -> None:
    resumes(name, Way(closure))


WAYS = {
    "clipped": Way(clip=0.3),
    "clipped in a closure": Way(clip=0.3, closure=True),
    "clipped, zeroed in place": Way(clip=0.3, to_none=False),
    "halved": Way(factor=0.5),
    "halved in a closure": Way(factor=0.5, closure=True),
    "halved, zeroed in place": Way(factor=0.5, to_none=False),
    "micro-batches": Way(micro_batches=3),
    "clipped micro-batches with a warm-up": Way(clip=0.3, micro_batches=3, scheduled=True),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["perceptron", "lstm"])
def test_so_it_does_however_the_loop_is_written(name: str, way: str) -> None:
    resumes(name, WAYS[way])


def test_a_state_replaces_what_the_first_pass_of_another_run_has_shown() -> None:
    """Into an optimizer that has taken steps of its own, with other blocks."""
    one, other = (Run("matrix in some", Way()) for _ in range(2))
    x, y = NETWORKS["matrix in some"].batches(1)[0]
    flipped = x * torch.tensor([-1.0, 1.0, 1.0, 1.0, 1.0])
    one.step(x, y)
    other.step(flipped, y)
    kinds = [
        {type(m).__name__ for m in run.optimizer._state.curvature.blocks} for run in (one, other)
    ]
    assert kinds[0] != kinds[1]
    other.load(copy.deepcopy(one.contents()))
    for run in (one, other):
        run.step(flipped, y)
        run.step(x, y)
    assert same(one.contents(), other.contents())
