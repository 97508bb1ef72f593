"""A training run in memory: everything that changes from iteration to iteration, and its state."""

import math
import time
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from kronfac import (
    KFAC,
    AdaptiveBatchSampler,
    KronfacError,
)
from kronfac_experiments.config import TrainConfig
from kronfac_experiments.optimizers import (
    DivergedError,
    StepNumbers,
    Stepper,
    TrainingFailedError,
    make_stepper,
)
from kronfac_experiments.task import Task
from kronfac_experiments.training import ExponentialBatchSize, ScheduledBatchSampler, averaged

FIRST_BATCH, BATCH_GROWTH = 1000, 500
"""The paper's mini-batches grow from 1000 cases to all of them in 500 iterations [MG15 §13]."""
DECAY = 0.99
"""ξ of the averaged iterates [MG15 §13]."""
MOST_REFUSALS = 10
"""Steps in a row that K-FAC may refuse before the run counts as failed."""


NUMBERS = ("loss", "lambda", "gamma", "rho", "next_rho", "alpha", "mu")
"""Of a row of the metrics; null if an optimizer has no such thing."""


class Session:
    """Model, optimizer, sampler, average and clocks.

    `seconds` is the time of the steps and of averaging: drawing and gathering mini-batches,
    evaluating, logging and saving are not counted.

    Args:
        config: Resolved.
        task: On the device and in the dtype of the configuration.
    """

    def __init__(self, config: TrainConfig, task: Task) -> None:
        torch.manual_seed(config.seed)
        self._task = task
        x = task.train.inputs
        self.model: nn.Module = task.make_model(config.seed).to(x.device, x.dtype)
        # A copy of the model, so before an optimizer may leave its hooks there.
        self._average_from = config.average or 0
        self.average: AveragedModel | None = None
        if self._average_from:
            self.average = averaged(self.model, DECAY)
        self._stepper = make_stepper(config, self.model, task.loss)
        self.optimizer = self._stepper.optimizer
        self.sampler = _sampler(config, len(task.train), self._stepper)
        self.iteration = 0
        self.cases = 0
        self.seconds = 0.0
        self.errors: dict[str, float] = {}
        """As last evaluated."""
        self._refusals = 0

    def start(self) -> dict[str, Any]:
        """The row of iteration 0."""
        return self._row(self._stepper.start(), 0)

    def step(self) -> dict[str, Any]:
        """One iteration; what it did, as a row of the metrics."""
        drawn = self.sampler.next_indices()
        cases = self._task.train.select(drawn)
        began = time.perf_counter()
        numbers = self._stepper.step(cases.inputs, cases.targets)
        stepped = time.perf_counter()
        self.iteration += 1
        if self.average is not None and self.iteration >= self._average_from:
            self.average.update_parameters(self.model)
            _synchronize(cases.inputs.device)
            numbers.parts["averaging"] = time.perf_counter() - stepped
        self.seconds += time.perf_counter() - began
        self.cases += len(drawn) * (1 + numbers.trials)
        self._count_refusals(numbers)
        return self._row(numbers, len(drawn))

    def _count_refusals(self, numbers: StepNumbers) -> None:
        self._refusals = self._refusals + 1 if numbers.refused else 0
        if self._refusals >= MOST_REFUSALS:
            raise DivergedError(
                f"K-FAC refused {self._refusals} steps in a row: {'; '.join(numbers.events)}"
            )

    def _row(self, step: StepNumbers, batch: int) -> dict[str, Any]:
        row: dict[str, Any] = {
            "iteration": self.iteration,
            "cases": self.cases,
            "seconds": self.seconds,
            "batch": batch,
            **{name: step.numbers.get(name) for name in NUMBERS},
        }
        if self.iteration:
            row["parts"] = {part: round(seconds, 6) for part, seconds in step.parts.items()}
        if step.events:
            row["events"] = list(step.events)
        return row

    def state_dict(self) -> dict[str, Any]:
        """All that the next iteration depends on."""
        device = self._task.train.inputs.device
        return {
            "iteration": self.iteration,
            "cases": self.cases,
            "seconds": self.seconds,
            "errors": {name: e for name, e in self.errors.items() if math.isfinite(e)},
            "refusals": self._refusals,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "sampler": self.sampler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "random": torch.get_rng_state(),
            "device_random": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from there, bit for bit."""
        self.iteration = state["iteration"]
        self.cases = state["cases"]
        self.seconds = state["seconds"]
        self.errors = state["errors"]
        self._refusals = state["refusals"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.sampler.load_state_dict(state["sampler"])
        if self.average is not None:
            self.average.load_state_dict(state["average"])
        torch.set_rng_state(state["random"].cpu())
        if state["device_random"] is not None:
            torch.cuda.set_rng_state(state["device_random"].cpu(), self._task.train.inputs.device)


def _sampler(
    config: TrainConfig, cases: int, stepper: Stepper
) -> AdaptiveBatchSampler | ScheduledBatchSampler:
    if config.batch == "adaptive":
        assert isinstance(stepper.optimizer, KFAC)
        return AdaptiveBatchSampler(cases, stepper.optimizer, seed=config.seed)
    size: Any = config.batch
    if config.batch == "paper":
        size = ExponentialBatchSize(min(FIRST_BATCH, cases), cases, BATCH_GROWTH)
    return ScheduledBatchSampler(cases, size, seed=config.seed)


def step_or_explain(session: Session) -> dict[str, Any]:
    """One iteration; whatever goes wrong in it is an error that names the iteration.

    Raises:
        DivergedError: the optimizer left the numbers behind.
        TrainingFailedError: anything else that a step may raise.
    """
    try:
        return session.step()
    except DivergedError as error:
        raise DivergedError(f"Iteration {session.iteration + 1}: {error}") from error
    except (KronfacError, ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise TrainingFailedError(f"Iteration {session.iteration + 1}: {reason}") from error


def _synchronize(device: torch.device) -> None:
    """Wait for a device that works behind, so that the clock sees its time."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
