"""When the error is measured, and on what."""

import math

from torch import nn
from torch.optim.swa_utils import AveragedModel

from kronfac_experiments.task import Task

EARLY = 100
EARLY_EVERY = 10


def evaluation_due(iteration: int, every: int, until_error: bool) -> bool:
    """Whether to evaluate after this iteration: every 10 up to 100, then every `every`, never if that is 0.

    A run that ends at an error is evaluated every 10 iterations throughout: every 50, the examples that it
    took would be overstated by those of up to 49 mini-batches.
    """
    often = iteration <= EARLY or until_error
    return bool(every) and iteration % (min(EARLY_EVERY, every) if often else every) == 0


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
