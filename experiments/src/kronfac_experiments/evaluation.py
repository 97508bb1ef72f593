"""When the error is measured, and on what."""

import math
from dataclasses import dataclass

from torch import nn
from torch.optim.swa_utils import AveragedModel

from kronfac_experiments.task import Task

EARLY = 100
EARLY_EVERY = 10


@dataclass(frozen=True)
class EvaluationSchedule:
    """Every 10 iterations up to 100, then every `every`, and once at each of `seconds`.

    A run that ends at an error is evaluated every 10 iterations throughout: every 50, the examples that it
    took would be overstated by those of up to 49 mini-batches.

    Args:
        every: Iterations; 0 for no evaluations but the first and the last, which always take place.
        seconds: Marks in seconds of optimiser time.
        until_error: Whether the run ends at an error.
    """

    every: int
    seconds: tuple[float, ...] = ()
    until_error: bool = False

    def due(self, iteration: int, before: float, after: float) -> bool:
        """Whether to evaluate after this iteration, which took the clock from `before` to `after`."""
        if any(before < mark <= after for mark in self.seconds):
            return True
        if not self.every:
            return False
        often = iteration <= EARLY or self.until_error
        every = min(EARLY_EVERY, self.every) if often else self.every
        return iteration % every == 0


def evaluate(
    task: Task, model: nn.Module, average: AveragedModel | None, cases: int | None = None
) -> dict[str, float]:
    """Training and test error of the current and, once there are any, the averaged parameters.

    Args:
        task: Its data, and the error.
        model: Current parameters.
        average: Averaged ones.
        cases: Number to measure on, the first ones of each set; None for all.
    """
    train, test = (part.select(slice(cases)) for part in (task.train, task.test))
    errors = {"train_error": task.error(model, train), "test_error": task.error(model, test)}
    if average is not None and int(average.n_averaged) > 0:
        errors["averaged_train_error"] = task.error(average, train)
        errors["averaged_test_error"] = task.error(average, test)
    return errors


def best_error(errors: dict[str, float]) -> float:
    """The smaller training error of current and averaged parameters [MG15 §13]; ∞ without any."""
    return min(errors.get(name, math.inf) for name in ("train_error", "averaged_train_error"))
