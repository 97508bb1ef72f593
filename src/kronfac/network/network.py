"""What is trained: a model, its units, and the vectors in the space of their parameters."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from kronfac.curvature import Curvature, DiagonalBlock, DiagonalMoments, Tap
from kronfac.errors import StateError
from kronfac.network.blocks import Blocks
from kronfac.network.find import Site
from kronfac.network.learned import (
    Learned,
    LearnedState,
    Placement,
    load_learned,
    load_unit,
    save_learned,
)
from kronfac.network.sharded import Shards
from kronfac.network.side_effects import Buffers, put_back
from kronfac.network.unit import Unit, parameters_of
from kronfac.objective import Objective
from kronfac.vector import Matrices


@dataclass(frozen=True, eq=False)
class Network:
    """A model with its units in order, and the loss that it is trained with."""

    model: nn.Module
    """For K-FAC's own passes: what `torch.compile` wrapped, where hooks still fire."""
    units: Sequence[Unit]
    sites: Sequence[Site]
    objective: Objective
    buffers: Buffers
    blocks: Blocks = field(default_factory=Blocks)
    """How blocks are chosen."""
    links: Sequence[bool] = ()
    """Whether each unit and the next are neighbours in a chain."""
    discovered: bool = False
    """Whether the uses of all units have been looked at (`discovery.py`)."""
    learned: Learned = field(default_factory=Learned)
    shards: Shards | None = None
    """The user's own parameters, if they are sharded over processes: `model` is a whole copy then."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, in the order of the units."""
        return parameters_of(self.units)

    @property
    def given(self) -> list[nn.Parameter]:
        """The same as the user's model has them, which may be sharded."""
        shards = self.shards
        return self.parameters if shards is None else [shards.given(p) for p in self.parameters]

    @property
    def device(self) -> torch.device:
        """The device of the first parameter."""
        return self.units[0].parameters[0].device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first parameter."""
        return self.units[0].dtype

    @property
    def placement(self) -> Placement:
        """Where the parameters are."""
        return [(p.dtype, p.device) for p in self.parameters]

    @cached_property
    def convolutional(self) -> bool:
        """Whether a layer that is known has a kernel: it meets its weights at many places of an example."""
        return any(
            unit.observed and unit.chosen and p.dim() > 2
            for unit in self.units
            for p in unit.parameters
        )

    def unused(self, number: int) -> list[Tap]:
        """What a unit shows that no example uses: zeros."""
        unit = self.units[number]
        rows, columns = (
            torch.zeros(1, 1, size, dtype=unit.dtype, device=self.device) for size in unit.shape
        )
        return [Tap(columns, rows)]

    @torch.no_grad()
    def theta(self) -> Matrices:
        """The parameters, a copy."""
        joined = ((unit.join(unit.parameters), unit.parameters[0]) for unit in self.units)
        # With one parameter there is nothing to join.
        return tuple(V.clone() if V.data_ptr() == first.data_ptr() else V for V, first in joined)

    def join(self, tensors: Sequence[Tensor]) -> Matrices:
        """A vector from tensors shaped like `parameters`."""
        parts = iter(tensors)
        return tuple(unit.join([next(parts) for _ in unit.parameters]) for unit in self.units)

    def split(self, vector: Matrices) -> list[Tensor]:
        """Tensors shaped like `parameters` from a vector, views of it."""
        return [t for unit, V in zip(self.units, vector, strict=True) for t in unit.split(V)]

    @torch.no_grad()
    def move(self, delta: Matrices, factor: float = 1.0) -> None:
        """θ ← θ + factor · δ."""
        for p, part in zip(self.parameters, self.split(delta), strict=True):
            p.add_(part, alpha=factor)
        self.push()

    @torch.no_grad()
    def place(self, theta: Matrices) -> None:
        """θ as given."""
        for p, part in zip(self.parameters, self.split(theta), strict=True):
            p.copy_(part)
        self.push()

    def push(self) -> None:
        """Write θ to the shards, if there are some."""
        if self.shards is not None:
            self.shards.push()

    @contextmanager
    def displaced(self, delta: Matrices, factor: float = 1.0) -> Iterator[None]:
        """θ + factor · δ while this lasts; then θ again, to the bit.

        In place: so it holds for whatever the model's code does with its parameters.
        """
        parameters = self.parameters
        kept = [p.detach().clone() for p in parameters]
        try:
            self.move(delta, factor)
            yield
        finally:
            put_back(list(zip(parameters, kept, strict=True)))
            self.push()

    def learned_state(self) -> LearnedState:
        """What passes have shown of it, to be saved."""
        return save_learned(self.learned, self.units if self.discovered else ())

    def continued(
        self,
        order: Sequence[int],
        curvature: Curvature | None,
        state: LearnedState | None = None,
    ) -> "Network":
        """The network as it was when a state was saved: its units' order and links, and their blocks.

        A state of an earlier version says of blocks only which ones became diagonal.

        Raises:
            StateError: what passes have shown is not of these units.
        """
        network = self if state is None else replace(self, learned=load_learned(state))
        if curvature is not None:
            links = [link is not None for link in curvature.links]
            network = network.reordered(order, links)
        if state is not None:
            return network._shown(state) if state.units else network
        if curvature is None:
            return network
        return network.demoted(
            [
                n
                for n, moments in enumerate(curvature.blocks)
                if isinstance(moments, DiagonalMoments)
                and network.units[n].chosen
                and not isinstance(network.units[n].block, DiagonalBlock)
            ]
        )

    def _shown(self, state: LearnedState) -> "Network":
        """The same with the blocks that the first pass of an earlier run has shown to fit."""
        if len(state.units) != len(self.units):
            raise StateError(
                f"The state's learned.units must have one entry for each of {len(self.units)} units; got "
                f"{len(state.units)}. Load an earlier state."
            )
        pairs = zip(self.units, state.units, strict=True)
        units = [load_unit(unit, shown, self.blocks) for unit, shown in pairs]
        return replace(self, units=units, discovered=True)

    def demoted(
        self, numbers: Sequence[int], why: str = "not all uses of it are seen"
    ) -> "Network":
        """The same with diagonal blocks for units whose uses are not all seen."""
        if not numbers:
            return self
        units = [
            unit.unobserved(why) if n in numbers else unit for n, unit in enumerate(self.units)
        ]
        linked = [n for n, link in enumerate(self.links) if link]
        kept = [
            n in linked and n not in numbers and n + 1 not in numbers
            for n in range(len(self.links))
        ]
        return replace(self, units=units, links=kept)

    def reordered(self, order: Sequence[int], links: Sequence[bool]) -> "Network":
        """The same with the units in another order."""
        return replace(self, units=[self.units[n] for n in order], links=links)
