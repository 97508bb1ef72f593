"""Mini-batches that grow exponentially, and the endless sampler that draws them [MG15 §13]."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from kronfac.errors import StateError

# Added before rounding down, as in the authors' program, so that a size which is a whole number
# on paper does not lose an example to floating point.
ROUNDING_SLACK = 1e-6


@dataclass(frozen=True)
class ExponentialBatchSize:
    """The size of the k-th mini-batch, growing from `initial` to `final` in `iterations` steps.

    m_k = min(⌊initial · exp((k − 1) / b)⌋, final), b such that m_iterations = final [MG15 §13].
    The paper has `initial` 1000, `final` the number of training examples and `iterations` 500.

    Example:
        >>> schedule = ExponentialBatchSize(initial=1000, final=60_000, iterations=500)
        >>> schedule(1), schedule(200), schedule(500)
        (1000, 5118, 60000)
    """

    initial: int
    final: int
    iterations: int

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= self.final:
            raise ValueError(
                "ExponentialBatchSize needs 1 <= initial <= final, got "
                f"initial={self.initial} and final={self.final}."
            )
        if self.iterations < 2:
            raise ValueError(
                "ExponentialBatchSize needs at least 2 iterations to grow in, got "
                f"iterations={self.iterations}. For a fixed size, use the number itself."
            )

    def __call__(self, k: int) -> int:
        """m_k, for k = 1, 2, 3 and so on."""
        if k < 1:
            raise ValueError(f"ExponentialBatchSize counts iterations from 1, got k={k}.")
        if k >= self.iterations:  # and no overflow in exp, however long the run
            return self.final
        growth = math.log(self.final / self.initial) / (self.iterations - 1)  # 1 / b
        size = math.floor(self.initial * math.exp((k - 1) * growth) + ROUNDING_SLACK)
        return min(size, self.final)


class ScheduledBatchSampler(Sampler[list[int]]):
    """Endless mini-batches: the k-th is the first m_k indices of a fresh random permutation.

    Works as `DataLoader(data, batch_sampler=sampler)`; for data that is one tensor,
    `data[sampler.next_indices()]` is faster. It never ends and has no length: the training loop
    decides when to stop. The position and the random state are the sampler's own, so a run
    continues exactly from `state_dict()`. Workers of a DataLoader (`num_workers > 0`) draw ahead
    of the training loop, and the state then counts the batches drawn, not those trained on.

    Args:
        cases: Number of examples in the data set.
        batch_size: m, or a function from k = 1, 2, … to m_k such as `ExponentialBatchSize`.
        seed: Seed of the sampler's own generator.
    """

    def __init__(self, cases: int, batch_size: int | Callable[[int], int], seed: int = 0) -> None:
        if cases < 1:
            raise ValueError(f"ScheduledBatchSampler needs at least one case, got cases={cases}.")
        self.cases = cases
        self.batch_size = batch_size
        self.iteration = 0
        self._generator = torch.Generator().manual_seed(seed)
        if not callable(batch_size):
            self._size(1)  # a wrong number shows here, not in the first iteration

    def _size(self, k: int) -> int:
        size = self.batch_size(k) if callable(self.batch_size) else self.batch_size
        if not 1 <= size <= self.cases:
            raise ValueError(
                "ScheduledBatchSampler needs 1 <= batch size <= cases, got a batch size of "
                f"{size} at iteration {k} with {self.cases} cases."
            )
        return size

    def next_indices(self) -> Tensor:
        """The indices of the next mini-batch, (m_k,), int64."""
        size = self._size(self.iteration + 1)
        self.iteration += 1
        # Drawn in full: what later iterations see then does not depend on the sizes before.
        return torch.randperm(self.cases, generator=self._generator)[:size]

    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield self.next_indices().tolist()

    def state_dict(self) -> dict[str, Any]:
        """Numbers and one tensor, for `torch.save` and `torch.load(weights_only=True)`."""
        return {
            "cases": self.cases,
            "iteration": self.iteration,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the sampler that gave `state` was."""
        if state["cases"] != self.cases:
            raise StateError(
                f"ScheduledBatchSampler was saved with {state['cases']} cases and is loaded into "
                f"one of {self.cases}. Build it for the data set of the saved run."
            )
        self.iteration = state["iteration"]
        # A map_location may have moved it; a CPU generator takes its state from CPU only.
        self._generator.set_state(state["generator"].cpu())
