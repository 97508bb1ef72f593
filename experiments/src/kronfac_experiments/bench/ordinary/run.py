"""One training run in the plainest loop there is, with only the steps on the clock.

    >>> from kronfac_experiments.bench.ordinary.problems import PROBLEMS
    >>> from kronfac_experiments.bench.ordinary.run import adamw, kfac, run_one
    >>> record = run_one(PROBLEMS["wine"], kfac(), seed=0, seconds=0.05)
    >>> record.last < record.first
    True

Any `make(model, loss)` that returns something with a `step(x, y)` can be run.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import KFAC, KronfacError
from kronfac_experiments.bench.ordinary.problems import Problem
from kronfac_experiments.plain_steps import GradientSteps, KfacSteps, Steps
from kronfac_experiments.task import Cases

MARKS = (0.0, 0.01, 0.02, 0.03, 0.05, 0.07, *(k / 20 for k in range(2, 21)))
"""Shares of the seconds at which a run is evaluated, closer at the start."""
WARM_UP = 3
"""Steps of a copy before the clock runs: what PyTorch loads at first use is no optimizer's time."""
SLICE = 0.5
"""Seconds that runs side by side take turns in."""


Make = Callable[[nn.Module, nn.Module], Steps]


def kfac(**options: Any) -> Make:
    """K-FAC as `KFAC(model, loss)`, or with other arguments than the default ones."""
    return lambda model, loss: KfacSteps(KFAC(model, loss, **options))


def adamw(lr: float) -> Make:
    """AdamW without weight decay: the training loss is what K-FAC minimises too."""

    def make(model: nn.Module, loss: nn.Module) -> Steps:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
        return GradientSteps(model, loss, optimizer)

    return make


@dataclass
class Record:
    """What a run did: a value for each of MARKS that it reached.

    Evaluations are at the end of the first step that ends at the mark or later.
    """

    train_loss: list[float] = field(default_factory=list)
    """Over all training cases, of the current parameters."""
    validation_error: list[float] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    """Time of the steps."""
    failure: str = ""
    """Why it ended before its time."""

    @property
    def first(self) -> float:
        """The loss before the first step."""
        return self.train_loss[0]

    @property
    def last(self) -> float:
        """The loss at the end."""
        return self.train_loss[-1]


def shuffled_batches(cases: Cases, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches for ever: every epoch has each case once, and a last mini-batch of what is left."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        for rows in torch.randperm(len(cases), generator=generator).split(size):
            yield cases.inputs[rows], cases.targets[rows]


class Run:
    """A run that can be stopped and continued at any second of its clock.

    Args:
        problem: What is trained.
        make: Makes the optimizer.
        seed: Seed of initial parameters and mini-batches.
        seconds: Time of the steps after which it ends.
    """

    def __init__(self, problem: Problem, make: Make, seed: int, seconds: float) -> None:
        self._problem, self._seconds = problem, seconds
        copy = make(problem.make_model(seed), problem.make_loss())
        for x, y in islice(self._shuffled(seed), WARM_UP):
            copy.step(x, y)
        self.model = problem.make_model(seed)
        self.steps = make(self.model, problem.make_loss())
        self._batches = self._shuffled(seed)
        self.record = Record()
        self._evaluate()

    def _shuffled(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        return shuffled_batches(self._problem.split.train, self._problem.batch_size, seed)

    def advance(self, until: float) -> None:
        """Go on until the clock says so, or the end."""
        record, until = self.record, min(until, self._seconds)
        while record.seconds < until and not record.failure:
            x, y = next(self._batches)
            began = time.perf_counter()
            try:
                self.steps.step(x, y)
            except KronfacError as error:
                record.failure = str(error)
            record.seconds += time.perf_counter() - began
            record.steps += 1
            self._evaluate()

    def _evaluate(self) -> None:
        """At the marks that were passed, if any."""
        record = self.record
        marks = MARKS[len(record.train_loss) :]
        passed = sum(mark * self._seconds <= record.seconds for mark in marks)
        if not passed:
            return
        loss = self._problem.training_loss(self.model)
        error = self._problem.error(self.model, self._problem.split.validation)
        record.train_loss += [loss] * passed
        record.validation_error += [error] * passed
        if not math.isfinite(loss) and not record.failure:
            record.failure = f"The loss became {loss}."


def run_one(problem: Problem, make: Make, seed: int, seconds: float) -> Record:
    """The run from its start to its end."""
    run = Run(problem, make, seed, seconds)
    run.advance(seconds)
    return run.record


def run_side_by_side(
    problem: Problem, makes: Sequence[Make], seed: int, seconds: float
) -> list[Record]:
    """Runs from one start that take turns, so that a slow moment of the machine hits all of them."""
    runs = [Run(problem, make, seed, seconds) for make in makes]
    for turn in range(math.ceil(seconds / SLICE)):
        # Who begins changes from turn to turn.
        for run in runs if turn % 2 == 0 else reversed(runs):
            run.advance((turn + 1) * SLICE)
    return [run.record for run in runs]
