"""One run on a network, with only its steps on the clock, that can take turns with others.

Evaluated are the current parameters, or the average of about the last tenth of the iterates if it has
the lower training loss; that is the same for everyone, whatever its steps cost, and no validation
example has a say in it.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from kronfac import KronfacError
from kronfac_experiments.bench.race.networks.problems import NetworkProblem, spread_out
from kronfac_experiments.bench.race.networks.racers import Racer
from kronfac_experiments.task import Cases

MARKS = (0.0, 0.02, 0.05, *(k / 10 for k in range(1, 11)))
"""Shares of the seconds at which a run is evaluated, closer at the start."""
TUNING_MARKS = (0.7, 1.0)
TAIL = 9
"""θ̄ ← θ̄ + min(1, 9 / (t + 9)) (θ − θ̄) at step t weighs the last ninth of the steps like a plain mean does
(Shamir and Zhang, 2013)."""
WARM_UP_EXAMPLES = 8
"""Examples in a step of a copy before the clock runs: what PyTorch loads at first use is no one's time."""
EVALUATED_AT_A_TIME = 500
Row = list[float]
"""Step, examples, seconds, training loss, validation loss, validation metric."""


def batches(cases: Cases, size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Mini-batches for ever: each epoch in a new order, without its last mini-batch if that is smaller."""
    generator = torch.Generator().manual_seed(seed)
    size = min(size, len(cases))
    while True:
        order = torch.randperm(len(cases), generator=generator)
        for rows in order[: len(order) - len(order) % size].split(size):
            yield cases.inputs[rows], cases.targets[rows]


class Evaluator:
    """Losses and metrics on fixed parts of a problem's data, in `eval()` mode.

    Args:
        problem: With its data.
        evaluated: Examples of training and of validation.
    """

    def __init__(self, problem: NetworkProblem, evaluated: tuple[int, int]) -> None:
        self._problem, self._loss = problem, problem.loss()
        self.train = spread_out(problem.split.train, evaluated[0])
        self.validation = spread_out(problem.split.validation, evaluated[1])

    @torch.no_grad()
    def on(self, model: nn.Module, cases: Cases) -> tuple[float, float]:
        """Loss and metric, means over the examples, summed in float64."""
        model.eval()
        loss = metric = 0.0
        for x, y in zip(
            cases.inputs.split(EVALUATED_AT_A_TIME),
            cases.targets.split(EVALUATED_AT_A_TIME),
            strict=True,
        ):
            outputs = model(x)
            loss += len(x) / len(cases) * float(self._loss(outputs, y))
            metric += len(x) / len(cases) * float(self._problem.metric(outputs, y).mean())
        model.train()
        return loss, metric


class Run:
    """A run that can be stopped and continued at any second of its clock.

    Args:
        problem: What is trained.
        racer: Who trains.
        lr: Its peak rate; None for K-FAC.
        seed: Seed of initial parameters, mini-batches and dropout.
        seconds: Time of the steps after which it ends.
        batch: Examples in a mini-batch.
        evaluator: Of the same problem.
        marks: Shares of the seconds to evaluate at.
        clock: Seconds from some start: `time.perf_counter`, or `time.process_time` for the processor's.
    """

    def __init__(
        self,
        problem: NetworkProblem,
        racer: Racer,
        lr: float | None,
        seed: int,
        seconds: float,
        batch: int,
        evaluator: Evaluator,
        marks: Sequence[float] = MARKS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._seconds, self._evaluator = seconds, evaluator
        self._marks = [mark * seconds for mark in marks]
        self._warm_up(problem, racer, lr)
        self.model = problem.make_model(seed)
        self._average = copy.deepcopy(self.model)
        self._steps = racer.steps(self.model, problem.loss(), lr, problem.clip)
        self._batches = batches(problem.split.train, batch, seed)
        self._random = torch.Generator().manual_seed(seed).get_state()
        self._batch = min(batch, len(problem.split.train))
        self.step, self.seconds = 0, 0.0
        self.rows: list[Row] = []
        self.message = ""
        if self._marks[0] <= 0:
            self._evaluate()

    def _warm_up(self, problem: NetworkProblem, racer: Racer, lr: float | None) -> None:
        copied = racer.steps(problem.make_model(0), problem.loss(), lr, problem.clip)
        first = problem.split.train.first(WARM_UP_EXAMPLES)
        with torch.random.fork_rng(devices=[]):
            copied.step(first.inputs, first.targets, 0.0)

    @property
    def ended(self) -> bool:
        """Whether its time is over, or it failed."""
        return bool(self.message) or self.seconds >= self._seconds

    def advance(self, until: float) -> float:
        """Go on until the clock says so, or the end; return the seconds that it took."""
        began_at, until = self.seconds, min(until, self._seconds)
        # Dropout draws from the global generator, and runs take turns.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            while self.seconds < until and not self.message:
                self._one_step()
            self._random = torch.get_rng_state()
        return self.seconds - began_at

    def _one_step(self) -> None:
        x, y = next(self._batches)
        began = self._clock()
        try:
            self._steps.step(x, y, self.seconds / self._seconds)
        # A decomposition that does not converge is a RuntimeError, and a result: others go on.
        except (KronfacError, RuntimeError) as error:
            self.message = f"Step {self.step + 1}: {error}"
        self.seconds += self._clock() - began
        self.step += 1
        self._take_into_average()
        if self.seconds >= self._marks[0]:
            self._evaluate()

    @torch.no_grad()
    def _take_into_average(self) -> None:
        weight = min(1.0, TAIL / (self.step + TAIL))
        for mean, parameter in zip(
            self._average.parameters(), self.model.parameters(), strict=True
        ):
            mean.lerp_(parameter, weight)

    def _evaluate(self) -> None:
        """At the marks that were passed; the last one stays."""
        later = [mark for mark in self._marks if mark > self.seconds]
        self._marks = later or [math.inf]
        for mean, buffer in zip(self._average.buffers(), self.model.buffers(), strict=True):
            mean.copy_(buffer)  # of BatchNorm, an average already
        evaluator = self._evaluator
        losses = {m: evaluator.on(m, evaluator.train)[0] for m in (self.model, self._average)}
        best = min(losses, key=lambda model: _or_infinite(losses[model]))
        row = [losses[best], *evaluator.on(best, evaluator.validation)]
        if all(map(math.isfinite, row)):
            self.rows.append([self.step, self.step * self._batch, self.seconds, *row])
        elif not self.message:
            self.message = f"Step {self.step}: the loss became {losses[self.model]}."


def _or_infinite(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf
