"""What surrounds the optimizer in the paper's experiments: start, mini-batches, averaging [MG15 §13]."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from kronfac.errors import StateError

ROUNDING_SLACK = 1e-6
"""Added before rounding down, as in the authors' program, so that a size which is a whole number on paper
does not lose an example to floating point."""


@dataclass(frozen=True)
class ExponentialBatchSize:
    """The size of the k-th mini-batch, growing from `initial` to `final` in `iterations` steps.

    m_k = min(⌊initial · exp((k − 1) / b)⌋, final), b such that m_iterations = final [MG15 §13].
    The paper has `initial` 1000, `final` the number of training examples and `iterations` 500.
    """

    initial: int
    final: int
    iterations: int

    def __call__(self, k: int) -> int:
        """m_k, for k = 1, 2, 3 and so on."""
        if k >= self.iterations:  # and no overflow in exp, however long the run
            return self.final
        growth = math.log(self.final / self.initial) / (self.iterations - 1)  # 1 / b
        size = math.floor(self.initial * math.exp((k - 1) * growth) + ROUNDING_SLACK)
        return min(size, self.final)


class ScheduledBatchSampler:
    """Endless mini-batches: the k-th is the first m_k indices of a fresh random permutation.

    The position and the random state are the sampler's own, so a run continues exactly from `state_dict()`.

    Args:
        cases: Number of examples in the data set.
        batch_size: m, or a function from k = 1, 2, … to m_k such as `ExponentialBatchSize`.
        seed: Seed of the sampler's own generator.
    """

    def __init__(self, cases: int, batch_size: int | Callable[[int], int], seed: int = 0) -> None:
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
        self.iteration += 1
        # Drawn in full: what later iterations see then does not depend on the sizes before.
        drawn = torch.randperm(self.cases, generator=self._generator)
        return drawn[: self._size(self.iteration)]

    def state_dict(self) -> dict[str, Any]:
        """Numbers and one tensor, for `torch.save` and `torch.load(weights_only=True)`."""
        generator = self._generator.get_state()
        return {"cases": self.cases, "iteration": self.iteration, "generator": generator}

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


def averaged(model: nn.Module, decay: float = 0.99) -> AveragedModel:
    """A copy of the model that holds the average of its parameters over `update_parameters` calls.

    θ̄_t = ξ_t θ̄_{t−1} + (1 − ξ_t) θ_t, with ξ_t = min(1 − 1/t, `decay`) at the t-th call: the first
    one copies, and up to t = 1 / (1 − `decay`) it is the plain mean. The paper has ξ = 0.99; the
    authors' program makes its first call at iteration 200, as the iterates before are far away.

    Deviation: the paper states a constant ξ. That would weigh the first iterate as heavily as the
    last hundred; min(1 − 1/t, ξ) is what the authors' program does.
    """

    def average(mean: Tensor, parameter: Tensor, updates: Tensor | int) -> Tensor:
        """θ̄ + (1 − ξ_t) (θ − θ̄), where `updates` is t − 1."""
        # The weight stays a tensor: reading the counter would synchronise with the device.
        precision = torch.promote_types(mean.dtype, torch.float32)
        t = torch.as_tensor(updates, device=mean.device, dtype=precision) + 1
        weight = t.reciprocal().clamp(min=1.0 - decay)
        return torch.lerp(mean, parameter, weight.to(mean.dtype))

    return AveragedModel(model, avg_fn=average)


@torch.no_grad()
def sparse_(
    model: nn.Module, generator: torch.Generator | None = None, connections: int = 15
) -> None:
    """The sparse initialisation of Martens (2010): a few random incoming weights for every unit, in place.

    W[i, j_c] ~ N(0, 1) for c = 1 … `connections`, with j_c uniform over the inputs; all other
    weights and all biases are 0. The j_c are drawn with replacement and of duplicates the last
    counts, as in the authors' program: a unit may get fewer than `connections` weights.

    Args:
        model: Its linear layers are drawn in the order of `modules()`.
        generator: Source of the draws, which are made in float32; PyTorch's global one when None.
        connections: Draws per unit.
    """
    for layer in (m for m in model.modules() if isinstance(m, nn.Linear)):
        draws = (layer.out_features, connections)
        columns = torch.randint(layer.in_features, draws, generator=generator)
        values = torch.randn(draws, generator=generator, dtype=torch.float32).to(layer.weight)
        layer.weight.zero_()
        # One connection at a time: `scatter_` leaves open which of two duplicates wins.
        for column, value in zip(columns.split(1, 1), values.split(1, 1), strict=True):
            layer.weight.scatter_(1, column, value)
        if layer.bias is not None:
            layer.bias.zero_()
