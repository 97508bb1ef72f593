"""What is trained: a model, its units, and the vectors in the space of their parameters.

A unit has the parameters that one curvature block describes, as one matrix V (rows, columns). For a layer
s = W a + b that is V = [W b], (out, in+1), so that s = V ā with ā = (a, 1) [MG15 §2.1]. A vector in
parameter space is a tuple with one such matrix per unit: gradients, updates, directions.

What the first passes show of a network is saved with the state: a resumed run goes by what the run before
has seen, as other mini-batches may show something else.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from kronfac.curvature import Block, DiagonalBlock, Tap
from kronfac.errors import UnsupportedModelError
from kronfac.linalg import Matrices
from kronfac.model.blocks import Blocks, Kind
from kronfac.model.registry import Site
from kronfac.model.side_effects import Buffers, put_back
from kronfac.objective import Objective
from kronfac.storage import Storable

Placement = Sequence[tuple[torch.dtype, torch.device]]
"""The dtype and the device of every parameter."""


class MatrixLayout(NamedTuple):
    """How a parameter is read as matrices, (matrices, rows, columns), each multiplied with vectors a."""

    transposed: int = 0
    """1 if it is stored as (in, out / groups, …), and not as (out, in / groups, …)."""
    groups: int = 1
    """Groups of rows with inputs of their own, as in grouped convolutions."""
    parts: int = 1
    """Packed matrices with the same inputs, such as queries, keys and values, or the gates of an LSTM."""

    def split(self, t: Tensor) -> Tensor:
        """Return (matrices, rows, columns) from a tensor in the parameter's shape."""
        if self.transposed:
            t = t.unflatten(0, (self.groups, -1)).transpose(1, 2).flatten(0, 1)
        return t.reshape(self.groups * self.parts, len(t) // (self.groups * self.parts), -1)

    def join(self, X: Tensor, shape: torch.Size) -> Tensor:
        """Return a tensor in the parameter's shape from (matrices, rows, columns)."""
        if not self.transposed:
            return X.reshape(shape)
        apart = X.reshape(self.groups, shape[1], shape[0] // self.groups, *shape[2:])
        return apart.transpose(1, 2).flatten(0, 1)

    def size(self, shape: torch.Size) -> tuple[int, int, int]:
        """Return the numbers of matrices, rows and columns for a parameter of this shape."""
        rows = self.groups * shape[1] if self.transposed else shape[0]
        return self.groups * self.parts, rows // (self.groups * self.parts), shape.numel() // rows


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters with one curvature block, side by side as the columns of one matrix."""

    name: str
    """The layer's path in the model, or the parameter's; used in errors and in saved states."""
    names: tuple[str, ...]
    """Full names of the parameters."""
    parameters: tuple[nn.Parameter, ...]
    block: Block
    """How its curvature is approximated."""
    swapped: int = 0
    """For weights that are stored as (in, out / groups, …), the number of groups; 0 for (out, in, …)."""
    observed: bool = True
    """Whether its uses are seen; else only its gradient is."""
    chosen: bool = True
    """Whether its block was chosen by an adapter; else by what the first pass shows of its uses."""
    kind: Kind | Literal[""] = ""
    """The kind of use that its block was chosen for in the first pass; none if that of its adapter fits."""
    why: str = ""
    """Why it has no better block, for the plan."""
    original: "Unit | None" = None
    """What it was before the first pass, if that has shown that another block fits."""

    @property
    def undiscovered(self) -> "Unit":
        """What it was before the first pass."""
        return self if self.original is None else self.original

    def unobserved(self, why: str) -> "Unit":
        """The unit with a diagonal block, which is estimated from the gradient alone."""
        return replace(
            self,
            block=DiagonalBlock(),
            observed=False,
            kind="",
            why=why,
            original=self.undiscovered,
        )

    @cached_property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows, sum(p.numel() for p in self.parameters) // self.rows

    @cached_property
    def rows(self) -> int:
        """The length of the first parameter; of one that nothing is known of, without dimensions of 1."""
        first = self.parameters[0]
        if self.swapped and first.dim() > 1:  # not a bias whose weight is frozen or shared
            return self.swapped * first.shape[1]
        if not self.chosen:
            return next((size for size in first.shape if size > 1), 1)
        return len(first) if first.dim() else 1

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        return self.parameters[0].dtype

    def join(self, tensors: Iterable[Tensor]) -> Tensor:
        """V from tensors shaped like the parameters."""
        columns = [self._matrix(t) for t in tensors]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def join_examples(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """(examples, rows, columns) from (examples, …) shaped like the parameters; None for zeros."""
        known = next(t for t in tensors if t is not None)
        columns = [
            known.new_zeros(len(known), self.rows, p.numel() // self.rows)
            if t is None
            else t.reshape(len(t), self.rows, -1)
            for t, p in zip(tensors, self.parameters, strict=True)
        ]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)

    def _matrix(self, t: Tensor) -> Tensor:
        """(rows, …) from a tensor shaped like one of the parameters."""
        if self.swapped and t.dim() > 1:
            t = MatrixLayout(1, self.swapped).split(t)
        return t.reshape(self.rows, -1)

    def split(self, V: Tensor) -> list[Tensor]:
        """Split V into tensors of the parameters' shapes: views, unless weights are swapped in groups."""
        parts = []
        for p, start, stop in self._columns:
            if p.dim() == 1 and stop - start == 1:
                parts.append(V[:, start])
            elif self.swapped and p.dim() > 1:
                parts.append(MatrixLayout(1, self.swapped).join(V[:, start:stop], p.shape))
            else:
                part = V[:, start:stop]
                parts.append(part if part.shape == p.shape else part.reshape(p.shape))
        return parts

    @cached_property
    def _columns(self) -> list[tuple[nn.Parameter, int, int]]:
        """Every parameter with its first column and one past its last."""
        found, start = [], 0
        for p in self.parameters:
            stop = start + p.numel() // self.rows
            found.append((p, start, stop))
            start = stop
        return found

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, shape={self.shape}, block={type(self.block).__name__})"


@dataclass(frozen=True)
class ExampleDims(Storable):
    """Where one kind of pass has its examples; by default along the first dimension of everything."""

    apart: bool = True
    """Whether some of the examples can be taken alone; else the pass is used whole."""
    second: tuple[str, ...] = ()
    """The names of units whose outputs have them along the second dimension."""
    unknown: tuple[str, ...] = ()
    """The names of units whose outputs have them along neither."""
    zeros: tuple[str, ...] = ()
    """The names of parameters that were exactly zero when this was found, and may hide something."""

    def of(self, name: str) -> int | None:
        """The dimension in the outputs of a unit; None if there is none."""
        if not self.apart or name in self.unknown:
            return None
        return 1 if name in self.second else 0


BY_CONVENTION = ExampleDims()


@dataclass(frozen=True)
class UnitState(Storable):
    """What the first pass has shown of a unit."""

    kind: str
    """See `Unit.kind`."""
    observed: bool


@dataclass
class Learned(Storable):
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

    @cached_property
    def parameters(self) -> list[nn.Parameter]:
        """All trained parameters, in the order of the units."""
        return [p for unit in self.units for p in unit.parameters]

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


def refuse_dtypes(units: Sequence[Unit]) -> None:
    """Refuse parameters that are not in float32 or float64.

    Raises:
        UnsupportedModelError: there are some.
    """
    others = [
        u for u in units if any(p.dtype not in (torch.float32, torch.float64) for p in u.parameters)
    ]
    if others:
        named = ", ".join(f"{u.name!r} ({u.dtype})" for u in others)
        raise UnsupportedModelError(
            f"KFAC needs real parameters in float32 or float64; got {named}. Keep the model in float32, "
            "and for half precision call it inside torch.autocast."
        )
