"""SGD and K-FAC from the same start, a step of each in turn on the same mini-batch.

Machines are noisy and change their clock: of two times only those taken beside each other compare.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import KFAC, KronfacError
from kronfac_experiments.plain_steps import GradientSteps, KfacSteps

SGD_LR = 1e-4
"""Small: time does not depend on it, as long as nothing becomes infinite."""


class RefusedStepError(KronfacError):
    """A step was refused, and its time means nothing."""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one step of each."""

    sgd: float
    kfac: float
    parts: dict[str, float]
    """Seconds of K-FAC's step by part."""


class PairedSteps:
    """Both optimizers, each with a network of its own.

    Args:
        build: Makes the network, the same each time.
        loss: Shared.
        arguments: For `KFAC`.
    """

    def __init__(
        self, build: Callable[[], nn.Module], loss: nn.Module, arguments: dict[str, Any]
    ) -> None:
        self.kfac = KFAC(build(), loss, **arguments)
        self._kfac_steps = KfacSteps(self.kfac)
        model = build()
        self._sgd_steps = GradientSteps(model, loss, torch.optim.SGD(model.parameters(), lr=SGD_LR))

    def step(self, x: Tensor, y: Tensor) -> Seconds:
        """One step of each on these cases.

        Raises:
            RefusedStepError: K-FAC took none.
        """
        start = time.perf_counter()
        self._sgd_steps.step(x, y)
        between = time.perf_counter()
        self._kfac_steps.step(x, y)
        end = time.perf_counter()
        report = self.kfac.report
        assert report is not None
        if report.refused:
            raise RefusedStepError(f"A step was refused: {report.events[0].message}")
        return Seconds(between - start, end - between, report.seconds)
