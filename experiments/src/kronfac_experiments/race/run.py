"""One run, with only its steps on the clock, and what a step of each contestant costs.

Evaluated are the current parameters, or the average of about the last ninth of the iterates if it has the
lower training loss: the same for everyone, and no validation example has a say in it.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import torch
from torch import Tensor, nn

from kronfac import KronfacError
from kronfac_experiments.race.contestants import Contestant, Schedule, Settings, rate
from kronfac_experiments.race.problem import Batch, Problem, state_bytes

MARKS = (0.0, 0.02, 0.05, *(k / 10 for k in range(1, 11)))
"""Shares of a run at which it is evaluated, closer at the start."""
TUNING_MARKS = (0.5, 0.7, 0.8, 0.9, 1.0)
TAIL = 9
"""θ̄ ← θ̄ + min(1, 9 / (t + 9)) (θ − θ̄) weighs the last ninth of the steps like a plain mean does
(Shamir and Zhang, 2013)."""
FIRST_STEPS, ROUNDS, ROUND_STEPS = 20, 5, 20
"""Steps of each contestant at the start, and rounds of steps after them, when costs are measured: some
refresh something every 10, 20 or 50 steps."""
Clock = Callable[[], float]


def clock_for(threads: int) -> Clock:
    """The processor's clock for one thread, which other programs do not disturb; else the wall's."""
    return time.process_time if threads == 1 else time.perf_counter


class Training:
    """A contestant on a problem, from a seed's start.

    Args:
        problem: What is trained.
        contestant: Who trains.
        settings: Of the contestant.
        seed: Seed of initial parameters, mini-batches and dropout.
        schedule: Of the learning rate, for those that have one.
        clock: Seconds from some start.
    """

    def __init__(
        self,
        problem: Problem,
        contestant: Contestant,
        settings: Settings,
        seed: int,
        schedule: Schedule,
        clock: Clock,
    ) -> None:
        self._problem, self._schedule, self._clock = problem, schedule, clock
        self._plain, self._scheduled = not contestant.curvature, contestant.scheduled
        self.model = problem.make_model(seed)
        self._average = copy.deepcopy(self.model)
        self._loss = problem.loss()
        self.optimizer = contestant.build(self.model, self._loss, problem, settings)
        self._peaks = [group.get("lr") for group in self.optimizer.param_groups]
        self._batches = self._drawn(contestant, settings, seed)
        self._random = torch.Generator().manual_seed(seed).get_state()
        self.steps, self.examples, self.seconds = 0, 0, 0.0

    def _drawn(
        self, contestant: Contestant, settings: Settings, seed: int
    ) -> Iterator[tuple[Batch, int]]:
        if contestant.sampler is not None:
            sampler = contestant.sampler(self._problem.examples, self.optimizer, seed)
            for _ in count():
                rows = sampler.next_indices()
                yield self._problem.batch(rows), len(rows)
        size = settings["batch"]
        for batch in self._problem.shuffled(None if size is None else int(size), seed):
            yield batch, len(batch[0]) if batch else self._problem.examples

    def step(self, share: float) -> None:
        """One step at the rate for this share of the run.

        Raises:
            KronfacError: K-FAC gave up.
            RuntimeError: a decomposition did not converge.
        """
        batch, examples = next(self._batches)
        with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
            torch.set_rng_state(self._random)
            began = self._clock()
            if self._scheduled:
                for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
                    group["lr"] = float(peak or 0.0) * rate(self._schedule, share)
            try:
                self.optimizer.step(lambda: self._closure(batch))  # type: ignore[arg-type,return-value]
            finally:
                self.seconds += self._clock() - began
            self._random = torch.get_rng_state()
        self.steps += 1
        self.examples += examples
        self._take_into_average()

    def _closure(self, batch: Batch) -> Tensor:
        problem = self._problem
        self.optimizer.zero_grad()
        loss = problem.objective(self.model, self._loss, batch)
        loss.backward()
        if self._plain:
            if problem.penalty:
                loss = loss + self._penalty()
            if problem.clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), problem.clip)
        return loss

    @torch.no_grad()
    def _penalty(self) -> Tensor:
        """η/2 ‖θ‖², whose gradient is added to the parameters'."""
        total = torch.zeros(())
        for parameter in self.model.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(parameter, alpha=self._problem.penalty)
            total = total + parameter.square().sum()
        return self._problem.penalty / 2 * total

    @torch.no_grad()
    def _take_into_average(self) -> None:
        weight = min(1.0, TAIL / (self.steps + TAIL))
        for mean, parameter in zip(
            self._average.parameters(), self.model.parameters(), strict=True
        ):
            mean.lerp_(parameter, weight)

    @property
    def state_bytes(self) -> int:
        """Bytes of the optimizer's state."""
        return state_bytes(self.optimizer.state_dict())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the trained parameters."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def evaluate(self) -> list[float]:
        """A row: step, examples, seconds, training loss, validation loss and metric."""
        for mean, buffer in zip(self._average.buffers(), self.model.buffers(), strict=True):
            mean.copy_(buffer)  # BatchNorm's are averages already
        losses = {m: self._problem.training_loss(m) for m in (self.model, self._average)}
        best = min(losses, key=lambda m: losses[m] if math.isfinite(losses[m]) else math.inf)
        numbers = [losses[best], *self._problem.validation(best)]
        return [
            self.steps, self.examples, round(self.seconds, 3),
            *(float(f"{number:.6g}") for number in numbers),
        ]  # fmt: skip


def run(
    training: Training,
    *,
    steps: int | None,
    seconds: float | None,
    marks: Sequence[float] = MARKS,
    tick: Callable[[float], None] = lambda share: None,
) -> tuple[list[list[float]], str]:
    """Train for so many steps, or seconds if that is None; the rows, and why it ended early.

    Args:
        training: From its start.
        steps: Steps.
        seconds: Seconds on the clock.
        marks: Shares of the run at which it is evaluated.
        tick: Called with the share that is done.
    """
    left = list(marks)
    rows: list[list[float]] = []
    message = ""

    def done() -> float:
        if steps is not None:
            return training.steps / steps
        assert seconds is not None
        return training.seconds / seconds

    while not message:
        share = done()
        if left and share >= left[0]:
            left = [mark for mark in left if mark > share]
            row = training.evaluate()
            if all(map(math.isfinite, row)):
                rows.append(row)
            else:
                message = f"Step {training.steps}: the loss became {row[3]}."
        if share >= 1 or message:
            break
        try:
            training.step(share)
        except (KronfacError, RuntimeError) as error:
            message = f"Step {training.steps + 1}: {error}"
        tick(min(1.0, done()))
    return rows, message


def step_costs(trainings: Sequence[Training], limit: float) -> list[tuple[float, float]]:
    """Seconds that the first steps take beyond later ones, and of each later one, taking turns.

    Args:
        trainings: One of each contestant.
        limit: Seconds after which a contestant takes no more steps.
    """

    def take(training: Training, steps: int) -> None:
        for _ in range(steps):
            if training.seconds < limit or training.steps == 0:
                training.step(0.5)

    for training in trainings:
        take(training, FIRST_STEPS)
    first = [(t.seconds, t.steps) for t in trainings]
    for _ in range(ROUNDS):
        for training in trainings:
            take(training, ROUND_STEPS)
    costs = []
    for training, (seconds, steps) in zip(trainings, first, strict=True):
        later = training.steps - steps
        each = (training.seconds - seconds) / later if later else seconds / steps
        costs.append((seconds - steps * each, each))
    return costs
