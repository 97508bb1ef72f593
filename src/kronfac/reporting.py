"""The numbers of every step to where a training run is watched: TensorBoard, Weights & Biases, a function.

None of these libraries is imported: what they are given to is known by its methods.
"""

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from kronfac.report import StepReport

NUMBERS = (
    "loss", "lambda_", "gamma", "alpha", "mu", "rho", "next_rho", "predicted_change", "examples",
    "mean_loss", "memory", "trials",
)  # fmt: skip
"""Fields of a report that are logged, if the step has computed them."""

Log = Callable[[dict[str, float], int], object]
"""Takes numbers by name, and the iteration."""


def log_to(
    optimizer: torch.optim.Optimizer, target: Any, *, prefix: str = "kfac/"
) -> RemovableHandle:
    """Log `optimizer.report` after every step; `handle.remove()` ends that.

    Numbers that are not finite, or that the step did not compute, are left out. `refused` and `rejected`
    are 1 or 0, and `seconds` is the sum over the parts of the step.

    Example:
        >>> from kronfac import KFAC
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = KFAC(model, torch.nn.MSELoss())
        >>> history = []
        >>> handle = log_to(optimizer, lambda numbers, step: history.append(numbers["kfac/loss"]))
        >>> _ = optimizer.step(optimizer.closure(torch.randn(8, 2), torch.randn(8, 1)))
        >>> len(history)
        1

    Args:
        optimizer: a `KFAC`.
        target: one of

            - a TensorBoard `SummaryWriter`: its `add_scalar` is called for every number;
            - a Weights & Biases run, or the module `wandb`: its `log(numbers, step=iteration)` is called
              (tested with an object that has this method, not with the library);
            - a `logging.Logger`: a line with all numbers at level INFO;
            - a function of numbers by name and the iteration, such as `mlflow.log_metrics`, or
              `log_metrics` of a Lightning logger.
        prefix: put before every name.

    Raises:
        TypeError: the optimizer has no report, or the target is none of these.
    """
    if not hasattr(optimizer, "report") or not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            "kronfac.log_to logs the report of a KFAC: log_to(optimizer, target); got a "
            f"{type(optimizer).__name__} as its optimizer."
        )
    log, last = _log_of(target), optimizer.report

    def after_step(optimizer: Any, args: object, kwargs: object) -> None:
        nonlocal last
        report: StepReport | None = optimizer.report
        if report is None or report is last:  # there was nothing to take a step from
            return
        last = report
        log({prefix + name: value for name, value in numbers_of(report).items()}, report.iteration)

    return optimizer.register_step_post_hook(after_step)


def numbers_of(report: StepReport) -> dict[str, float]:
    """The finite numbers of a report, by name."""
    named: dict[str, float | None] = {
        name.removesuffix("_"): getattr(report, name) for name in NUMBERS
    }
    named["seconds"] = sum(report.seconds.values())
    named["refused"], named["rejected"] = float(report.refused), float(report.rejected)
    return {
        name: float(value)
        for name, value in named.items()
        if value is not None and math.isfinite(value)
    }


def _log_of(target: Any) -> Log:
    """How a target takes numbers."""
    if isinstance(target, logging.Logger):
        return lambda numbers, step: target.info("step %d: %s", step, _line(numbers))
    if callable(getattr(target, "add_scalar", None)):

        def add_scalars(numbers: dict[str, float], step: int) -> None:
            for name, value in numbers.items():
                target.add_scalar(name, value, step)

        return add_scalars
    if callable(getattr(target, "log", None)):
        return lambda numbers, step: target.log(numbers, step=step)
    if callable(target):
        log: Log = target
        return log
    raise TypeError(
        "kronfac.log_to's target is a SummaryWriter, a run with log(), a logging.Logger, or a function of "
        f"numbers and step; got a {type(target).__name__}."
    )


def _line(numbers: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
