"""Mini-batches that grow where noise holds training up, measured by the optimizer itself.

The norm test of Byrd, Chin, Nocedal and Wu (2012) lets the mini-batch grow when the variance N of its
gradient is more than θ² times the squared gradient G. K-FAC has both in the metric that counts, that of
the Fisher, at no cost: a full step is predicted to gain (G + N)/2 and gains (G − N)/2 on cases it was not
made from, so ρ on the next mini-batch is (G − N)/(G + N), and the test N > θ²G is

    ρ < (1 − θ²)/(1 + θ²).
"""

import math
from typing import Any, Protocol

from kronfac.report import StepReport
from kronfac.training.batch_schedule import ScheduledBatchSampler


class Reporting(Protocol):
    """An optimizer that says what its last step did."""

    @property
    def report(self) -> StepReport | None:
        """Of the last step."""
        ...


class AdaptiveBatchSampler(ScheduledBatchSampler):
    """Endless mini-batches of a size that grows with the noise: the first m of a fresh permutation.

    With every ρ that the optimizer measures on a next mini-batch, an average of them below `threshold`
    makes m larger by the factor `growth`. Works as `DataLoader(data, batch_sampler=sampler)`, or by
    `data[sampler.next_indices()]`, and continues exactly from `state_dict()`.

    Example:
        >>> optimizer = KFAC(model, loss)
        >>> sampler = AdaptiveBatchSampler(len(x), optimizer)
        >>> for _ in range(100):
        ...     rows = sampler.next_indices()
        ...     optimizer.step(optimizer.closure(x[rows], y[rows]))

    Args:
        cases: Size of the data set.
        optimizer: A `KFAC` with `AdaptiveDamping`, which is its default.
        initial: The first m; all cases where there are fewer.
        final: The largest m; None for all cases.
        threshold: (1 − θ²)/(1 + θ²) of the norm test.
        growth: A factor.
        seed: Of the sampler's own generator.
    """

    def __init__(
        self,
        cases: int,
        optimizer: Reporting,
        *,
        initial: int = 500,
        final: int | None = None,
        threshold: float = 0.05,
        growth: float = 1.1,
        seed: int = 0,
    ) -> None:
        if not 0 <= threshold < 1:
            raise ValueError(f"AdaptiveBatchSampler's threshold lies in [0, 1); got {threshold}.")
        if not growth > 1:
            raise ValueError(f"AdaptiveBatchSampler's growth is a factor above 1; got {growth}.")
        if initial < 1 or not (final is None or initial <= final):
            raise ValueError(
                f"AdaptiveBatchSampler needs 1 <= initial <= final; got {initial} and {final}."
            )
        self._optimizer = optimizer
        self._final = min(cases, final or cases)
        self._threshold, self._growth = threshold, growth
        self.size = float(min(initial, self._final))
        """m, not yet rounded."""
        self._average = 1.0
        self._last: StepReport | None = None  # that was looked at
        super().__init__(cases, self._next_size, seed)

    def _next_size(self, k: int) -> int:
        self._look()
        return round(self.size)

    def _look(self) -> None:
        """At the report of the last step, once."""
        report = self._optimizer.report
        if report is None or report is self._last:
            return
        self._last = report
        if report.next_rho is not None and not math.isnan(report.next_rho):
            self._average += (min(max(report.next_rho, -1.0), 1.0) - self._average) / 4
            if self._average < self._threshold:
                self.size = min(self.size * self._growth, float(self._final))

    def state_dict(self) -> dict[str, Any]:
        """Numbers and one tensor, for `torch.save` and `torch.load(weights_only=True)`."""
        self._look()  # an optimizer that is loaded has no report
        return super().state_dict() | {"size": self.size, "average": self._average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the sampler that gave `state` was."""
        super().load_state_dict(state)
        self.size, self._average = state["size"], state["average"]
        self._last = self._optimizer.report
