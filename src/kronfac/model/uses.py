"""The uses of all units in one forward pass of K-FAC's own.

Observers of torch functions (`functions.py`) and hooks on modules whose adapter says itself how it uses its
parameters record here: the inputs of every use without a graph, and where its outputs are in the graph.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kronfac.curvature import AnyTap, Block, Inputs, OneHot
from kronfac.errors import UnsupportedModelError
from kronfac.model.layout import (
    PLAIN,
    Arrange,
    Elementwise,
    Layout,
    by_example,
    elementwise_tap,
    grouped_tap,
    has_examples,
    product_tap,
    transposed_tap,
)
from kronfac.model.network import BY_CONVENTION, ExampleDims, Unit
from kronfac.model.registry import Site

Watch = Callable[[Sequence[int], Tensor, int | None], None]
"""Called for every use with its units, its outputs (…, rows) and their dimension of examples, if known."""


class LazyInputs(Inputs, Protocol):
    """Inputs of images or the like, which are computed when they are needed."""

    def arranged(self, examples: int, constants: Sequence[float]) -> Inputs:
        """These inputs as those of so many examples, with further columns, such as the ones of a bias."""
        ...


Factor = Tensor | LazyInputs | None
"""What a parameter was multiplied with; None stands for ones."""


@dataclass(frozen=True)
class Recorded:
    """One use of one unit."""

    edge: int
    """The number of the edge at which its output gradient is taken."""
    tap: Callable[[Tensor], AnyTap]
    """Makes the tap of this use from that gradient."""
    product: bool = True
    """Whether it is a matrix product: no lookup, and no product of numbers one by one."""


class Uses:
    """What every unit was multiplied with, and where the results are in the graph.

    Args:
        units: of the network; those that are not observed are left out.
        examples: of the pass.
        dims: where it has its examples.
        watch: called with the outputs of every use.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        examples: int,
        dims: ExampleDims = BY_CONVENTION,
        watch: Watch | None = None,
    ) -> None:
        self.units = units
        self.examples = examples
        self.edges: list[GradientEdge] = []
        """Where the outputs of the uses entered the graph. Edges, not tensors: an activation may overwrite
        the outputs, after which the tensor stands for something else."""
        self.outputs: list[Tensor] = []
        """Tensors of the shapes and dtypes of the outputs, without their memory."""
        self.summed = False
        """Whether outputs of a use have no dimension of examples: gradients are then summed over them."""
        self.of: list[list[Recorded]] = [[] for _ in units]
        """The uses of every unit."""
        self._count = examples if dims.apart else 1
        self._dims = [dims.of(unit.name) for unit in units]
        self._watch = watch
        self._place = {
            id(p): (n, i)
            for n, unit in enumerate(units)
            if unit.observed
            for i, p in enumerate(unit.parameters)
        }

    def knows(self, value: Any) -> bool:
        """Whether this is a parameter of an observed unit."""
        return id(value) in self._place

    def swapped(self, weight: Tensor) -> bool:
        """Whether a parameter is stored as (in, out, …), and stands in V as its transpose."""
        return id(weight) in self._place and self.units[self._place[id(weight)][0]].swapped > 0

    def taps(self, unit: int, grads: Sequence[Tensor | None]) -> list[AnyTap]:
        """The taps of a unit, one for each use, from the gradients at all edges."""
        found = []
        for use in self.of[unit]:
            g = grads[use.edge]
            if g is None:
                g = torch.zeros_like(self.outputs[use.edge])
            # Outputs may be in half precision.
            tap = use.tap(g.detach().to(self.units[unit].dtype))
            if tap.examples != self.examples and _reduces(self.units[unit].block):
                raise UnsupportedModelError(
                    'KFAC was given sharing="reduce", which takes the places of each example together, but '
                    f"the outputs of {self.units[unit].name!r} do not have the {self.examples} examples "
                    'along the first or second dimension. Use Blocks(sharing="expand"), the default.'
                )
            found.append(tap)
        return found

    @property
    def half_precision(self) -> bool:
        """Whether some outputs have few digits: a model may have an autocast of its own."""
        return any(like.dtype in (torch.float16, torch.bfloat16) for like in self.outputs)

    # ----------------------------------------------------------------------------------- recording

    def product(
        self,
        outputs: Tensor,
        factors: Sequence[tuple[Tensor | None, Factor]],
        layout: Layout = PLAIN,
    ) -> None:
        """outputs = Σ_p P x_p for pairs (P, x_p), at every example and place.

        x_p is (…, columns), with the same dimensions in front as the outputs have in their layout, or
        `LazyInputs`. If only some rows of the units were multiplied, `layout` says which.
        """
        found = self._by_unit(outputs, factors)
        if not found:
            return
        arranged = layout.arranged(outputs.detach())
        edge = self._edge(outputs, [*found], arranged, layout.dim)
        for n, columns in found.items():
            unit, dim = self.units[n], self._dim(n, layout.dim)
            lead = by_example(arranged[..., :1], self._count, dim)
            x = self._columns(unit, columns, lead.to(unit.dtype), dim)
            self._add(n, edge, partial(product_tap, layout, x, unit.rows), dim)

    def transposed(self, outputs: Tensor, weight: Tensor, x: Tensor) -> None:
        """outputs = Pᵀ x, with x (…, len(P))."""
        if self.swapped(weight):
            self.product(outputs, [(weight, x)])
            return
        for n, columns in self._by_unit(outputs, [(weight, x)]).items():
            inputs = by_example(x.detach().to(self.units[n].dtype), self._count, self._dims[n])
            self._backwards(n, columns, outputs, inputs)

    def lookup(
        self,
        outputs: Tensor,
        weight: Tensor,
        indices: Tensor,
        scale: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> None:
        """outputs = Pᵀ e_i for indices i, which may be scaled.

        With `counts`, of the indices' shape, they are sums over those of the last dimension that count.
        """
        for n, columns in self._by_unit(outputs, [(weight, None)]).items():
            index, factor, counted = (
                t if t is None else by_example(t.unsqueeze(-1), self._count, self._dims[n])[..., 0]
                for t in (indices, scale, counts)
            )
            assert index is not None
            hot = OneHot(index.long(), len(weight), weight.dtype, factor)
            self._backwards(n, columns, outputs, hot, counted)

    def _backwards(
        self,
        n: int,
        columns: Mapping[int, Any],
        outputs: Tensor,
        x: Tensor | Inputs,
        counts: Tensor | None = None,
    ) -> None:
        """Record a use of Vᵀ, or of those of its columns that one parameter has."""
        unit, (i,) = self.units[n], columns
        start = sum(p.numel() for p in unit.parameters[:i]) // unit.rows
        stop = start + unit.parameters[i].numel() // unit.rows
        padding = (start, unit.shape[1] - stop)
        edge = self._edge(outputs, [n], outputs.detach(), None)
        tap = partial(transposed_tap, padding, counts, x)
        self._add(n, edge, tap, self._dims[n], product=isinstance(x, Tensor))

    def grouped(
        self,
        outputs: Tensor,
        factors: Sequence[tuple[Tensor | None, Tensor | None]],
        arrange: Arrange,
    ) -> None:
        """outputs = Σ_p P x_p for rows in groups, with x_p (groups, examples, places, columns)."""
        found = self._by_unit(outputs, factors)
        if not found:
            return
        lead = arrange(outputs.detach())
        edge = self._edge(outputs, [*found], lead.movedim(0, -2).flatten(-2), 0)
        for n, columns in found.items():
            unit = self.units[n]
            x = torch.cat(_parts(unit, columns, lead.to(unit.dtype)), dim=-1)
            self._add(n, edge, partial(grouped_tap, arrange, x), self._dim(n, 0))

    def elementwise(
        self, outputs: Tensor, factors: Sequence[tuple[Tensor | None, Elementwise]]
    ) -> None:
        """outputs = Σ_p P ⊙ x_p for pairs of P and x_p."""
        found = self._by_unit(outputs, factors)
        edge = self._edge(outputs, [*found], outputs.detach().unsqueeze(-1), None) if found else 0
        for n, columns in found.items():
            tap = partial(elementwise_tap, self.units[n], columns)
            self._add(n, edge, tap, self._dims[n], product=False)

    def by_module(self, site: Site, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        """A call of a module whose adapter says itself what its parameters are multiplied with."""
        for use in site.adapter.uses(site.module, args, kwargs, output):  # type: ignore[attr-defined]
            factors = [(site.module._parameters[name], x) for name, x in use.inputs.items()]
            self.product(use.outputs, factors, Layout(use.arrange))

    def _by_unit(
        self, outputs: Tensor, factors: Sequence[tuple[Tensor | None, Any]]
    ) -> dict[int, dict[int, Any]]:
        """For every unit that is used, what each of its parameters is multiplied with."""
        found: dict[int, dict[int, Any]] = {}
        empty = not outputs.numel() and self._count  # an expert that no example was sent to
        if empty or not outputs.requires_grad:
            return found
        for p, x in factors:
            if p is not None and id(p) in self._place:
                n, i = self._place[id(p)]
                found.setdefault(n, {})[i] = x
        return found

    def _dim(self, n: int, given: int | None) -> int | None:
        """The dimension of the examples in what a unit has computed."""
        return self._dims[n] if given is None or self._dims[n] is None else given

    def _edge(
        self, outputs: Tensor, units: Sequence[int], arranged: Tensor, dim: int | None
    ) -> int:
        """Note where outputs are in the graph; `arranged` are (…, rows)."""
        if self._watch is not None:
            self._watch(units, arranged, dim)
        lead = arranged.shape[:-1]
        self.summed = self.summed or not all(
            has_examples(lead, self._count, self._dim(n, dim)) for n in units
        )
        self.edges.append(get_gradient_edge(outputs))
        self.outputs.append(outputs.new_empty(()).expand(outputs.shape))
        return len(self.edges) - 1

    def _add(
        self,
        n: int,
        edge: int,
        tap: Callable[..., AnyTap],
        dim: int | None,
        product: bool = True,
    ) -> None:
        """Add a use; `tap` takes the number of examples, their dimension and the gradient."""
        # No method of this object, which would hold itself, and with it the graph.
        self.of[n].append(Recorded(edge, partial(tap, self._count, dim), product))

    def _columns(
        self, unit: Unit, columns: Mapping[int, Factor], lead: Tensor, dim: int | None
    ) -> Tensor | Inputs:
        """ā, (examples, places, columns), with zeros for parameters that this use does without.

        `lead` is (examples, places, 1).
        """
        first = columns.get(0)
        if first is not None and not isinstance(first, Tensor):
            constants = [
                float(i in columns)
                for i, p in enumerate(unit.parameters)
                for _ in range(p.numel() // unit.rows if i else 0)
            ]
            return first.arranged(len(lead), constants)
        given = {
            i: by_example(x, self._count, dim) if isinstance(x, Tensor) else x
            for i, x in columns.items()
        }
        parts = _parts(unit, given, lead)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _parts(unit: Unit, columns: Mapping[int, Any], lead: Tensor) -> list[Tensor]:
    """The columns of ā for every parameter: as given, ones for a bias, zeros for what is not used.

    They have the dimensions of `lead` but for the last.
    """
    parts = []
    for i, p in enumerate(unit.parameters):
        x = columns.get(i)
        if x is None:
            one_or_zero = lead.new_full((), float(i in columns))
            x = one_or_zero.expand(*lead.shape[:-1], p.numel() // unit.rows)
        parts.append(x.detach().to(unit.dtype))
    return parts


def _reduces(block: Block) -> bool:
    """Whether a block takes the places of an example together."""
    return any(getattr(b, "sharing", "") == "reduce" for b in (block, *vars(block).values()))
