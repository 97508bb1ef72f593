"""What is trained: a model, its units, and the vectors in the space of their parameters.

What the first passes show of a network is saved with the state: a resumed run goes by what the run before
has seen, as other mini-batches may show something else.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor, nn

from kronfac.curvature import Curvature, Tap
from kronfac.errors import StateError, UnsupportedModelError
from kronfac.linalg import Matrices
from kronfac.model.blocks import Blocks, Kind
from kronfac.model.find import Site, find_units
from kronfac.model.layout import ExampleDims
from kronfac.model.side_effects import Buffers, put_back
from kronfac.model.unit import Unit, parameters_of, refuse_dtypes
from kronfac.objective import Objective

Placement = Sequence[tuple[torch.dtype, torch.device]]
"""The dtype and the device of every parameter."""


@dataclass(frozen=True)
class UnitState:
    """What the first pass has shown of a unit."""

    kind: str
    """See `Unit.kind`."""
    observed: bool


@dataclass
class Learned:
    """What passes have shown of a network: where examples are, and which engine works."""

    dims: dict[str, ExampleDims] = field(default_factory=dict)
    """By the signatures of passes."""
    forward_mode: bool = True
    """False once a pass has had no forward-mode derivative, or a wrong one."""
    difference: float = 1.0
    """Length of finite differences, in units of the usual one."""
    compared: bool = False
    """Whether J v has been compared with Jᵀ r."""
    units: tuple[UnitState, ...] = ()
    """In a saved state, the units in their order; none before the first pass was looked at."""

    def copy(self, units: tuple[UnitState, ...] = ()) -> "Learned":
        """A copy that later passes do not change."""
        return replace(self, dims=dict(self.dims), units=units)


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
    placed: Placement | None = None
    """Where the parameters were in the last step; None before there was one."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        objective: Objective,
        blocks: Blocks | None = None,
        trained: Collection[nn.Parameter] | None = None,
    ) -> "Network":
        """The model with the units of these parameters; None for all that are not frozen."""
        blocks = Blocks() if blocks is None else blocks
        found = find_units(model, blocks, trained)
        return cls(model, found.units, found.sites, objective, Buffers(model), blocks)

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, in the order of the units."""
        return parameters_of(self.units)

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

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Changes when a parameter is written to or gets new memory, but not by writes to `p.data`."""
        return [(p.data_ptr(), p._version) for p in self.parameters]

    @cached_property
    def convolutional(self) -> bool:
        """Whether a layer that is known has a kernel: it meets its weights at many places of an example."""
        return any(
            unit.observed and unit.chosen and p.dim() > 2
            for unit in self.units
            for p in unit.parameters
        )

    def unused(self, number: int) -> list[Tap]:
        """The taps of a unit that no example uses: zeros."""
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

    @torch.no_grad()
    def place(self, theta: Matrices) -> None:
        """θ as given."""
        for p, part in zip(self.parameters, self.split(theta), strict=True):
            p.copy_(part)

    @contextmanager
    def displaced(self, delta: Matrices, factor: float = 1.0) -> Iterator[None]:
        """θ + factor · δ while this lasts; then θ again, to the bit.

        In place, because the model's code may do anything with its parameters.
        """
        parameters = self.parameters
        kept = [p.detach().clone() for p in parameters]
        try:
            self.move(delta, factor)
            yield
        finally:
            put_back(list(zip(parameters, kept, strict=True)))

    def learned_state(self) -> Learned:
        """What passes have shown of the network, to be saved."""
        units = self.units if self.discovered else ()
        return self.learned.copy(tuple(UnitState(unit.kind, unit.observed) for unit in units))

    def continued(
        self, order: Sequence[int], curvature: Curvature | None, state: Learned
    ) -> "Network":
        """The network as it was when a state was saved: its units' order and links, and their blocks.

        Raises:
            StateError: what passes have shown, or the curvature, is not of these units.
        """
        network = replace(self, learned=state.copy())
        if curvature is not None:
            links = [link is not None for link in curvature.links]
            network = network.reordered(order, links)
        if state.units:
            if len(state.units) != len(self.units):
                raise StateError(
                    f"The state's learned.units must have one entry for each of {len(self.units)} units; "
                    f"got {len(state.units)}. Load an earlier state."
                )
            pairs = zip(network.units, state.units, strict=True)
            units = [_continued(unit, shown, self.blocks) for unit, shown in pairs]
            network = replace(network, units=units, discovered=True)
        for unit, moments in zip(
            network.units, curvature.blocks if curvature else (), strict=False
        ):
            if not isinstance(moments, unit.block.moments):
                raise StateError(
                    f"The state's statistics of {unit.name!r} are {type(moments).__name__}; this KFAC has "
                    f"a {type(unit.block).__name__} for it. Use the block that it was saved with."
                )
        return network

    def demoted(
        self, numbers: Sequence[int], why: str = "not all uses of it are seen"
    ) -> "Network":
        """The network with diagonal blocks for units whose uses are not all seen."""
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
        """The network with its units in another order."""
        return replace(self, units=[self.units[n] for n in order], links=links)


def refuse_changes(network: Network) -> None:
    """Refuse a model that was changed since this KFAC was made, or moved since its last step.

    Raises:
        UnsupportedModelError: a unit is frozen or no longer in the model, or has moved to another dtype or
            device since the last step.
    """
    present = {id(p) for p in network.model.parameters()}
    gone = [
        name
        for unit in network.units
        for name, p in zip(unit.names, unit.parameters, strict=True)
        if id(p) not in present
    ]
    if gone:
        raise UnsupportedModelError(
            "KFAC trains the parameters that the model had when this KFAC was made; "
            f"{', '.join(map(repr, gone))} no longer belong to it: a layer was replaced or removed. Make a "
            "new KFAC after changing the model."
        )
    refuse_dtypes(network.units)
    before = network.placed
    if before is not None and before != (now := network.placement):
        old, new = next(pair for pair in zip(before, now, strict=True) if pair[0] != pair[1])
        raise UnsupportedModelError(
            "KFAC's statistics and momentum are where the parameters were in the last step, "
            f"{old[0]} on {old[1]}; the model has been moved to {new[0]} on {new[1]} since. Move it "
            "before KFAC is made, or load optimizer.state_dict() into a new KFAC, or into this one, after "
            "the move."
        )
    for unit in network.units:
        if not all(p.requires_grad for p in unit.parameters):
            raise UnsupportedModelError(
                f"{unit.name!r} has been frozen since this KFAC was made, which trains it; make a new one "
                "after changing the model."
            )


def _continued(unit: Unit, state: UnitState, blocks: Blocks) -> Unit:
    """A unit with the block that it got in the first pass of the run that is resumed.

    Raises:
        StateError: there is no such kind of use.
    """
    unit = unit.undiscovered
    if not state.observed:
        return unit.unobserved("not all uses of it were seen when the state was saved")
    if not state.kind:
        return unit
    kinds: dict[str, Kind] = {kind: kind for kind in get_args(Kind)}
    if state.kind not in kinds:
        raise StateError(
            f"The state's kind of use of {unit.name!r} must be one of {tuple(kinds)}; got {state.kind!r}. "
            "Load an earlier state."
        )
    kind = kinds[state.kind]
    return replace(unit, block=blocks.choose(kind, *unit.shape), kind=kind, original=unit)
