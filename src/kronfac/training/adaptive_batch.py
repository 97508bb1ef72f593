"""Mini-batches that grow where noise holds training up, measured by the optimizer itself.

The norm test of Byrd, Chin, Nocedal and Wu (2012) lets the mini-batch grow when the variance N of its
gradient is more than θ² times the squared gradient G. K-FAC has both in the metric that counts, that of
the Fisher, at no cost: a full step is predicted to gain (G + N)/2 and gains (G − N)/2 on cases it was not
made from, so ρ on the next mini-batch is (G − N)/(G + N), and the test N > θ²G is

    ρ < (1 − θ²)/(1 + θ²).
"""

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
        self._seen = 0  # the iteration whose report was last looked at
        super().__init__(cases, self._next_size, seed)

    def _next_size(self, k: int) -> int:
        report = self._optimizer.report
        if report is not None and report.iteration != self._seen:
            self._seen = report.iteration
            if report.next_rho is not None and report.next_rho == report.next_rho:
                self._average += (min(max(report.next_rho, -1.0), 1.0) - self._average) / 4
                if self._average < self._threshold:
                    self.size = min(self.size * self._growth, float(self._final))
        return round(self.size)

    def state_dict(self) -> dict[str, Any]:
        """Numbers and one tensor, for `torch.save` and `torch.load(weights_only=True)`."""
        own = {"size": self.size, "average": self._average, "seen": self._seen}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the sampler that gave `state` was."""
        super().load_state_dict(state)
        self.size, self._average, self._seen = state["size"], state["average"], state["seen"]
