"""A model, a loss and a mini-batch, as K-FAC sees them and as the dense definitions do."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.curvature import Block, Curvature, ExactFisher, Fisher
from kronfac.model import Blocks, Buffers, Network, find_units
from kronfac.objective import objective_of
from kronfac.record import Batch, record
from kronfac.record.discovery import discover
from kronfac.record.examples import check_examples
from tests.curvature.test_estimate import estimate_on
from tests.layers.truth import Truth, truth


@dataclass(frozen=True)
class Problem:
    """A model with (examples, …, outputs), and one mini-batch."""

    model: nn.Module
    x: Any
    loss: nn.Module
    y: Tensor
    blocks: Blocks = field(default_factory=Blocks)
    block: Callable[[Block], Block] | None = None
    """Another block in place of the one that a unit gets."""

    def outputs(self) -> Tensor:
        """What the loss is called with."""
        z = self.model(self.x)
        return z.reshape(-1, z.shape[-1]) if isinstance(self.loss, nn.CrossEntropyLoss) else z

    @property
    def examples(self) -> int:
        """The number of examples."""
        return len(self.x)

    @cached_property
    def _seen(self) -> tuple[Network, Batch]:
        found = find_units(self.model, self.blocks)
        objective = objective_of(self.loss)
        network = Network(
            self.model, found.units, found.sites, objective, Buffers(self.model), self.blocks
        )
        with record(self.model, objective) as recording, torch.enable_grad():
            self.loss(self.outputs(), self.y).backward()
        batch = check_examples(network, recording.batch())
        network = discover(network, batch.passes[0])
        if self.block is not None:
            units = [replace(unit, block=self.block(unit.block)) for unit in network.units]
            network = replace(network, units=units)
        return network, batch

    @property
    def network(self) -> Network:
        """As K-FAC has it after the first pass."""
        return self._seen[0]

    @property
    def batch(self) -> Batch:
        """As it was recorded."""
        return self._seen[1]

    def curvature(self, fisher: Fisher | None = None, seed: int = 0) -> Curvature:
        """K-FAC's estimate, of the exact Fisher by default."""
        generator = torch.Generator().manual_seed(seed)
        return estimate_on(self.network, self.batch, fisher or ExactFisher(), generator)

    @cached_property
    def truth(self) -> Truth:
        """The dense definitions."""
        return truth(self.model, self.loss, self.outputs, self.examples)


def regression(model: nn.Module, x: Any, **options: Any) -> Problem:
    """Least squares with targets of no importance."""
    with torch.no_grad():
        z = model(x)
    generator = torch.Generator().manual_seed(5)
    y = torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z.dtype)
    return Problem(model, x, nn.MSELoss(), y, **options)


def classification(model: nn.Module, x: Any, **options: Any) -> Problem:
    """Cross-entropy, of every place that the outputs have."""
    with torch.no_grad():
        z = model(x)
    generator = torch.Generator().manual_seed(5)
    y = torch.randint(z.shape[-1], (z[..., 0].numel(),), generator=generator)
    return Problem(model, x, nn.CrossEntropyLoss(), y, **options)
