"""Mini-batches that grow once noise is what slows training, measured by the optimizer itself.

The norm test of Byrd, Chin, Nocedal and Wu (2012) lets the mini-batch grow when the variance N of its
gradient is more than θ² times the squared gradient G. K-FAC has both in the metric that counts, that of
the Fisher, at no cost: a full step is predicted to gain (G + N)/2 and gains (G − N)/2 on examples that it
was not made from, so ρ on the next mini-batch is (G − N)/(G + N), and the test N > θ²G is

    ρ < (1 − θ²)/(1 + θ²).

Mini-batches of one pass over the data have no example in common, so that if one is above the average the
others are below. With m of all n examples in each, a step that fits its own noise loses more on the next
mini-batch than on all examples together, whose ρ is 1 − (1 − m/n) (1 − ρ). With more than half of the
examples in each, some are in both, and it is 1 − m/n (1 − ρ).

ρ is about one step. If noise soon takes away again what a step gains on the next mini-batch, ρ stays
above the threshold while training stands still. That shows in the losses: if those of the last ten
mini-batches are not lower than those of the ten before by more than the standard error of the difference,
noise is what is left to fight.

Over a pass the noise cancels. If momentum with a long memory (`LongMemory`) remembers several passes of
eight mini-batches, their noise is gone from what it follows, and larger ones would only be fewer. From
then on ρ, which is about a single step, says nothing of use, and m grows only when the loss has stopped
falling for as many mini-batches as are remembered.
"""

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Sampler

from kronfac.errors import StateError
from kronfac.report import StepReport

PASS, PASSES = 8, 4
"""Mini-batches in a pass over the data, and passes that momentum remembers, from which on ρ is no guide."""


class Reporting(Protocol):
    """An optimizer that says what its last step did."""

    @property
    def report(self) -> StepReport | None:
        """The report of the last step."""
        ...


class AdaptiveBatchSampler(Sampler[list[int]]):
    """Endless mini-batches of a size that grows with the noise.

    Every example comes once before any comes again, in an order that is new each time: over such a pass the
    noise of the mini-batches cancels. With every ρ that the optimizer measures on a next mini-batch, an
    average of them below `threshold` makes m larger by the factor `growth`; and so does a loss that has
    stopped falling by the factor `leap`. From an eighth of the examples on, if the optimizer remembers four
    passes over them, only the latter does, and with more patience.

    Works as `DataLoader(data, batch_sampler=sampler)`, or by `data[sampler.next_indices()]`, and continues
    exactly from `state_dict()`.

    Example:
        >>> optimizer = KFAC(model, loss)
        >>> sampler = AdaptiveBatchSampler(len(x), optimizer)
        >>> for _ in range(100):
        ...     rows = sampler.next_indices()
        ...     optimizer.step(optimizer.closure(x[rows], y[rows]))

    Args:
        cases: Number of examples in the data set.
        optimizer: A `KFAC` with `AdaptiveDamping`, which is its default.
        initial: The first m; all examples if there are fewer.
        final: The largest m; None for all examples.
        threshold: (1 − θ²)/(1 + θ²) of the norm test; 0 is θ = 1, more is less noise.
        growth: A factor.
        patience: Mini-batches whose losses are compared with those of as many before; None for never.
        leap: A factor.
        seed: Seed of the sampler's own generator.
    """

    def __init__(
        self,
        cases: int,
        optimizer: Reporting,
        *,
        initial: int = 500,
        final: int | None = None,
        threshold: float = 0.03,
        growth: float = 1.1,
        patience: int | None = 10,
        leap: float = 1.5,
        seed: int = 0,
    ) -> None:
        for rule, holds in (
            (f"cases is 1 or more; got {cases}", cases >= 1),
            (f"threshold lies in [-1, 1); got {threshold}", -1 <= threshold < 1),
            (f"growth is a factor above 1; got {growth}", growth > 1),
            (f"leap is a factor above 1; got {leap}", leap > 1),
            (f"patience is 2 or more, or None; got {patience}", patience is None or patience > 1),
            (f"initial is 1 or more; got {initial}", initial >= 1),
            (f"final is at least initial; got {final}", final is None or final >= initial),
        ):
            if not holds:
                raise ValueError(f"AdaptiveBatchSampler's {rule}.")
        if not hasattr(optimizer, "report"):
            raise TypeError(
                "AdaptiveBatchSampler goes by what a KFAC reports of its steps; got a "
                f"{type(optimizer).__name__}. Use a fixed batch size with other optimizers."
            )
        self._optimizer = optimizer
        self._final = min(cases, final or cases)
        self._threshold, self._growth = threshold, growth
        self._patience, self._leap = patience, leap
        self.size = float(min(initial, self._final))
        """m, not yet rounded."""
        self._average = 1.0
        self._losses: list[float] = []  # since m last made a leap, as many as are looked at
        self._left = torch.empty(0, dtype=torch.int64)  # of the current pass over the data
        self._last: StepReport | None = None  # that was looked at
        self.cases = cases
        self.iteration = 0
        self._generator = torch.Generator().manual_seed(seed)

    def next_indices(self) -> Tensor:
        """The indices of the next mini-batch, (m_k,), int64."""
        self._look()
        size = round(self.size)
        self.iteration += 1
        indices, self._left = self._left[:size], self._left[size:]
        if len(indices) < size:
            order = torch.randperm(self.cases, generator=self._generator)
            # None twice in a mini-batch: what was left of the last pass comes later in this one.
            repeated = torch.isin(order, indices)
            order = torch.cat([order[~repeated], order[repeated]])
            missing = size - len(indices)
            indices, self._left = torch.cat([indices, order[:missing]]), order[missing:]
        return indices

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.next_indices().tolist()

    def _look(self) -> None:
        """At the report of the last step, once."""
        report = self._optimizer.report
        if report is None or report is self._last:
            return
        self._last = report
        if report.next_rho is not None and not math.isnan(report.next_rho):
            share = min(report.examples / self.cases, 1.0)
            rho = 1 - max(share, 1 - share) * (1 - report.next_rho)
            self._average += (min(max(rho, -1.0), 1.0) - self._average) / 4
            if self._average < self._threshold and not self._cancels(self.size, report.memory):
                self._grow(self._growth, report.memory)
        if self._stalled(report.mean_loss, report.memory):
            self._grow(self._leap, report.memory)
            self._losses.clear()

    def _cancels(self, size: float, memory: float) -> bool:
        """Whether the noise of such mini-batches cancels in what momentum remembers."""
        return size * PASS >= self.cases and memory * size >= PASSES * self.cases

    def _grow(self, factor: float, memory: float) -> None:
        eighth = self.cases / PASS
        stops = self.size < eighth and self._cancels(eighth, memory)
        self.size = min(self.size * factor, eighth if stops else math.inf, float(self._final))

    def _stalled(self, loss: float | None, memory: float) -> bool:
        """Whether the losses, this one among them, have stopped falling."""
        if self._patience is None or loss is None or not math.isfinite(loss):
            return False
        count = self._patience
        if self._cancels(self.size, memory):
            count = max(count, round(memory))
        # No fewer than there were: momentum's memory may become shorter for a while.
        self._losses = [*self._losses, loss][-max(2 * count, len(self._losses)) :]
        if len(self._losses) < 2 * count:
            return False
        before, now = self._losses[-2 * count : -count], self._losses[-count:]
        (mean_before, variance_before), (mean_now, variance_now) = map(_moments, (before, now))
        error = math.sqrt((variance_before + variance_now) / count)
        return math.isfinite(error) and mean_before - mean_now < error

    def state_dict(self) -> dict[str, Any]:
        """Numbers and two tensors, for `torch.save` and `torch.load(weights_only=True)`."""
        self._look()  # an optimizer that is loaded has no report
        return {
            "cases": self.cases,
            "iteration": self.iteration,
            "generator": self._generator.get_state(),
            "size": self.size,
            "average": self._average,
            "left": self._left,
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the sampler that gave `state` was."""
        if missing := self.state_dict().keys() - state.keys():
            raise StateError(
                f"This is not the state of an AdaptiveBatchSampler: no {sorted(missing)}."
            )
        if state["cases"] != self.cases:
            raise StateError(
                f"AdaptiveBatchSampler was saved with {state['cases']} cases and is loaded into one of "
                f"{self.cases}. Make it for the data set of the saved run."
            )
        self.iteration = state["iteration"]
        # A map_location may have moved it; a CPU generator takes its state from CPU only.
        self._generator.set_state(state["generator"].cpu())
        self.size, self._average = state["size"], state["average"]
        self._left = state["left"].cpu()
        self._losses = [float(loss) for loss in state["losses"]]
        self._last = self._optimizer.report


def _moments(losses: list[float]) -> tuple[float, float]:
    """Mean and variance; infinite if they are too large, for which Python's own raise errors."""
    mean = sum(losses) / len(losses)
    return mean, sum((loss - mean) * (loss - mean) for loss in losses) / (len(losses) - 1)
