"""The uses of all units in one forward pass of K-FAC's own.

Observers of torch functions (`functions.py`) and hooks on modules whose adapter says itself how it uses its
parameters record here: the inputs of every use without a graph, and where its outputs are in the graph.

Examples are along the first dimension, unless the layer says otherwise (attention and recurrent layers have
time first inside) or a check has shown otherwise (`record/examples.py`). Outputs that have no dimension of
examples, such as the rows of a table of positions, count as those of one example: their gradient is the sum
over all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kronfac.curvature import AnyTap, Block, ElementwiseTap, GroupedTap, Inputs, OneHot, Tap
from kronfac.errors import UnsupportedModelError
from kronfac.model.find import Site
from kronfac.model.unit import Unit

Arrange = Callable[[Tensor], Tensor]
Factor = Tensor | Inputs | None
"""What a parameter was multiplied with; None stands for ones."""
Watch = Callable[[Sequence[int], Tensor, int | None], None]
"""Gets, for every use, the units, the outputs (…, rows), and their dimension of examples if it is known."""


# -------------------------------------------------------------------------------- where examples are


@dataclass(frozen=True)
class ExampleDims:
    """Where one kind of pass has its examples; by default along the first dimension of everything."""

    apart: bool = True
    """Whether some of the examples can be taken alone; else the pass is used whole."""
    second: frozenset[str] = frozenset()
    """The names of units whose outputs have them along the second dimension."""
    unknown: frozenset[str] = frozenset()
    """The names of units whose outputs have them along neither."""
    zeros: frozenset[str] = frozenset()
    """The names of parameters that were exactly zero when this was found, and may hide something."""

    def of(self, name: str) -> int | None:
        """The dimension in the outputs of a unit; None if there is none."""
        if not self.apart or name in self.unknown:
            return None
        return 1 if name in self.second else 0


BY_CONVENTION = ExampleDims()


def by_example(x: Tensor, examples: int, dim: int | None) -> Tensor:
    """(examples, places, features) from (…, features); (1, places, features) if no dimension has them.

    The dimension may also have several entries of each example, one after the other: (examples · k, …).
    """
    if not _has_examples(x.shape[:-1], examples, dim):
        return x.reshape(1, -1, x.shape[-1])
    assert dim is not None
    moved = x.movedim(dim, 0)
    places = moved.numel() // max(examples * x.shape[-1], 1)
    return moved.reshape(examples, places, x.shape[-1])


def _has_examples(lead: Sequence[int], examples: int, dim: int | None) -> bool:
    return dim is not None and dim < len(lead) and lead[dim] % max(examples, 1) == 0


@dataclass(frozen=True)
class Layout:
    """The layout of a use's outputs."""

    arrange: Arrange | None = None
    """Makes (…, rows) of a tensor of the outputs' shape, if that is another."""
    dim: int | None = None
    """The dimension of (…, rows) that has the examples, if the layer says it."""
    first_row: int = 0
    """The first row of V that was multiplied, if only some were."""
    counts: Tensor | None = None
    """Which places count, in the dimensions in front of the rows, bool: padding does not; None for all."""

    def arranged(self, outputs: Tensor) -> Tensor:
        """(…, rows)."""
        return outputs if self.arrange is None else self.arrange(outputs)

    def tap(self, x: Tensor | Inputs, examples: int, dim: int | None, rows: int, g: Tensor) -> Tap:
        """The tap of a product with V, from ā and the gradient at the outputs."""
        grads = by_example(self.arranged(g), examples, dim)
        after = rows - self.first_row - grads.shape[-1]
        if self.first_row or after:  # rows that were not used
            grads = torch.nn.functional.pad(grads, (self.first_row, after))
        counts = self.counts
        if counts is not None:
            counts = by_example(counts.unsqueeze(-1), examples, dim).squeeze(-1)
        return Tap(x, grads, counts)


PLAIN = Layout()


@dataclass(frozen=True)
class Elementwise:
    """How one parameter enters a product of numbers one by one."""

    x: Tensor | None
    """What it is multiplied with, in the shape of the outputs; None stands for ones."""
    shape: torch.Size
    """The shape that it is broadcast from."""
    derived: Tensor | None = None
    """What was computed from it and is used in its place."""

    def gradients(self, g: Tensor, p: Tensor, examples: int, dim: int | None) -> Tensor:
        """The gradient of every example, (examples, *p.shape), from that at the outputs."""
        product = g if self.x is None else g * self.x
        summed = sum_to_shape(product, self.shape, examples, dim)
        if self.derived is None:
            return summed.reshape(len(summed), *p.shape)
        (pulled,) = torch.autograd.grad(
            self.derived,
            p,
            summed.reshape(len(summed), *self.derived.shape),
            retain_graph=True,
            is_grads_batched=True,
        )
        return pulled.detach()


def sum_to_shape(x: Tensor, shape: torch.Size, examples: int, dim: int | None) -> Tensor:
    """x summed to a shape that is broadcast to its own, but for the examples: (examples or 1, *shape)."""
    full = torch.Size((1,) * (x.dim() - len(shape)) + tuple(shape))
    if dim is not None and _has_examples(x.shape, examples, dim) and full[dim] == 1:
        each = x.shape[dim] // max(examples, 1)
        moved = x.unflatten(dim, (examples, each)).movedim(dim, 0)
    else:
        moved = x.unsqueeze(0)
    over = [d + 1 for d, size in enumerate(full) if size == 1 and moved.shape[d + 1] != 1]
    summed: Tensor = moved.sum(dim=over, keepdim=True) if over else moved
    return summed.reshape(len(moved), *shape)


# ------------------------------------------------------------------------------- inputs, put together


@dataclass(frozen=True)
class Regrouped:
    """(examples, k · places, columns) of inputs (examples · k, places, columns), k after one another.

    The frames of a video go through a convolution as examples of their own.
    """

    inputs: Inputs
    examples: int

    @property
    def _each(self) -> int:
        """k."""
        return self.inputs.shape[0] // self.examples

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""
        _, places, columns = self.inputs.shape
        return torch.Size((self.examples, self._each * places, columns))

    def all(self) -> Tensor:
        """ā."""
        return self.inputs.all().reshape(self.shape)

    def rows(self) -> Tensor | OneHot:
        """The vectors of the inputs."""
        return self.inputs.rows()

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example."""
        apart = g.reshape(*self.inputs.shape[:2], g.shape[-1])
        each: Tensor = self.inputs.gradients(apart).unflatten(0, (self.examples, self._each))
        return each.sum(dim=1)

    def select(self, index: slice) -> "Regrouped":
        """The inputs of some of the examples."""
        start, stop, _ = index.indices(self.examples)
        some = self.inputs.select(slice(start * self._each, stop * self._each))
        return Regrouped(some, stop - start)


@dataclass(frozen=True)
class Augmented:
    """Inputs with further columns that are the same at every place, such as the ones of a bias."""

    inputs: Inputs
    columns: list[Tensor]  # (examples, places, …) each

    @property
    def shape(self) -> torch.Size:
        """(examples, places, columns)."""
        width = sum(x.shape[-1] for x in self.columns)
        return torch.Size((*self.inputs.shape[:2], self.inputs.shape[2] + width))

    def all(self) -> Tensor:
        """ā."""
        return torch.cat([self.inputs.all(), *self.columns], dim=-1)

    def rows(self) -> Tensor:
        """As many vectors as the inputs have."""
        rows, columns = self.inputs.rows(), torch.cat([x[0, 0] for x in self.columns])
        assert isinstance(rows, Tensor)
        return torch.cat([rows, columns.expand(len(rows), -1)], dim=-1)

    def gradients(self, g: Tensor) -> Tensor:
        """Σ_places g āᵀ of every example."""
        return torch.cat([self.inputs.gradients(g), *(g.mT @ x for x in self.columns)], dim=-1)

    def select(self, index: slice) -> "Augmented":
        """The inputs of some of the examples."""
        return Augmented(self.inputs.select(index), [x[index] for x in self.columns])


# ------------------------------------------------------------------------------------------ recording


@dataclass(frozen=True)
class Recorded:
    """One use of one unit."""

    edge: int
    """The number of the edge at which its output gradient is taken."""
    tap: Callable[[Tensor], AnyTap]
    """From that gradient to what the use shows."""
    source: Tensor | None = None
    """The inputs with their graph, if they are wanted."""


class Uses:
    """What every unit was multiplied with, and where the results are in the graph.

    Args:
        units: of the network; those that are not observed are left out.
        examples: of the pass.
        dims: where it has its examples.
        keep_sources: whether to keep the inputs with their graph.
        watch: is shown the outputs of every use.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        examples: int,
        dims: ExampleDims = BY_CONVENTION,
        keep_sources: bool = False,
        watch: Watch | None = None,
    ) -> None:
        self.units = units
        self.examples = examples
        self._count = examples if dims.apart else 1
        self._dims = [dims.of(unit.name) for unit in units]
        self.edges: list[GradientEdge] = []
        """Where the outputs of the uses entered the graph. Edges, not tensors: an activation may overwrite
        the outputs, after which the tensor stands for something else."""
        self.outputs: list[torch.Size] = []
        self.summed = False
        """Whether outputs of a use have no dimension of examples: gradients are then summed over them."""
        self._like: list[Tensor] = []
        self.of: list[list[Recorded]] = [[] for _ in units]
        """The uses of every unit."""
        self._keep, self._watch = keep_sources, watch
        self._place = {
            id(p): (n, i)
            for n, unit in enumerate(units)
            if unit.observed
            for i, p in enumerate(unit.parameters)
        }

    def knows(self, value: Any) -> bool:
        """Whether this is a parameter of an observed unit."""
        return id(value) in self._place

    def taps(self, unit: int, grads: Sequence[Tensor | None]) -> list[AnyTap]:
        """What every use of a unit shows, from the gradients at all edges."""
        found = []
        for use in self.of[unit]:
            g = grads[use.edge]
            if g is None:
                g = self._like[use.edge].new_zeros(self.outputs[use.edge])
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
        return any(like.dtype in (torch.float16, torch.bfloat16) for like in self._like)

    def swapped(self, weight: Tensor) -> bool:
        """Whether a parameter is stored as (in, out, …), and stands in V as its transpose."""
        return id(weight) in self._place and self.units[self._place[id(weight)][0]].swapped > 0

    # ----------------------------------------------------------------------------------- recording

    def product(
        self,
        outputs: Tensor,
        factors: Sequence[tuple[Tensor | None, Factor]],
        layout: Layout = PLAIN,
        source: Tensor | None = None,
    ) -> None:
        """outputs = Σ_p P x_p for pairs (P, x_p), at every example and place.

        x_p is (…, columns), with the same dimensions in front as the outputs have in their layout, or
        `Inputs`, which were computed from `source`. If only some rows of the units were multiplied,
        `layout` says which.
        """
        found = self._by_unit(outputs, factors)
        if not found:
            return
        arranged = layout.arranged(outputs.detach())
        edge = self._edge(outputs, [*found], arranged, layout.dim)
        for n, columns in found.items():
            unit, dim = self.units[n], self._dim(n, layout.dim)
            x = self._columns(unit, columns, by_example(arranged[..., :1], self._count, dim), dim)
            tap = partial(layout.tap, x, self._count, dim, unit.rows)
            self.of[n].append(Recorded(edge, tap, self._source([(None, source), *factors])))

    def transposed(self, outputs: Tensor, weight: Tensor, x: Tensor) -> None:
        """outputs = Pᵀ x, with x (…, len(P))."""
        if self.swapped(weight):
            self.product(outputs, [(weight, x)])
            return
        found = self._by_unit(outputs, [(weight, x)])
        for n in found:
            inputs = by_example(x.detach().to(self.units[n].dtype), self._count, self._dims[n])
            self._backwards(n, found, outputs, inputs, None, x)

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
        found = self._by_unit(outputs, [(weight, None)])
        for n in found:
            given = [
                None
                if t is None
                else by_example(t.unsqueeze(-1), self._count, self._dims[n]).squeeze(-1)
                for t in (indices, scale, counts)
            ]
            index, factor, counted = given
            assert index is not None
            hot = OneHot(index, len(weight), weight.dtype, factor)
            self._backwards(n, found, outputs, hot, counted, None)

    def _backwards(
        self,
        n: int,
        found: dict[int, dict[int, Any]],
        outputs: Tensor,
        x: Tensor | Inputs,
        counts: Tensor | None,
        source: Tensor | None,
    ) -> None:
        """Record a use of Vᵀ."""
        unit, (i,) = self.units[n], found[n]
        start = sum(p.numel() for p in unit.parameters[:i]) // unit.rows
        stop = start + unit.parameters[i].numel() // unit.rows
        padding = (start, unit.shape[1] - stop)
        edge = self._edge(outputs, [*found], outputs.detach(), None)
        # Not a method of this object, which would hold itself, and with it the graph.
        tap = partial(_transposed_tap, x, padding, counts, self._count, self._dims[n])
        self.of[n].append(Recorded(edge, tap, self._source([(None, source)])))

    def grouped(
        self,
        outputs: Tensor,
        factors: Sequence[tuple[Tensor | None, Factor]],
        arrange: Arrange,
        source: Tensor,
    ) -> None:
        """outputs = Σ_p P x_p for rows in groups, with x_p (groups, examples, places, columns)."""
        found = self._by_unit(outputs, factors)
        if not found:
            return
        lead = arrange(outputs.detach())
        edge = self._edge(outputs, [*found], lead.movedim(0, -2).flatten(-2), 0)
        for n, columns in found.items():
            unit = self.units[n]
            parts = []
            for i, p in enumerate(unit.parameters):
                x = columns.get(i)
                if not isinstance(x, Tensor):  # a bias, or a parameter that this use does without
                    value, width = 1.0 if i in columns else 0.0, p.numel() // unit.rows
                    x = lead.new_full((), value).expand(*lead.shape[:-1], width)
                parts.append(x.detach().to(unit.dtype))
            x = torch.cat(parts, dim=-1)
            tap = partial(_grouped_tap, x, arrange, self._count, self._dim(n, 0))
            self.of[n].append(Recorded(edge, tap, source if self._keep else None))

    def elementwise(
        self, outputs: Tensor, factors: Sequence[tuple[Tensor | None, Elementwise]]
    ) -> None:
        """outputs = Σ_p P ⊙ x_p for pairs of P and x_p."""
        found = self._by_unit(outputs, factors)
        edge = self._edge(outputs, [*found], outputs.detach().unsqueeze(-1), None) if found else 0
        for n, columns in found.items():
            unit, dim = self.units[n], self._dims[n]
            tap = partial(_elementwise_tap, unit, columns, self._count, dim)
            self.of[n].append(Recorded(edge, tap))

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
            _has_examples(lead, self._count, self._dim(n, dim)) for n in units
        )
        self.edges.append(get_gradient_edge(outputs))
        self.outputs.append(outputs.shape)
        self._like.append(outputs.new_empty(0))
        return len(self.edges) - 1

    def _columns(
        self, unit: Unit, columns: dict[int, Factor], lead: Tensor, dim: int | None
    ) -> Tensor | Inputs:
        """ā, (examples, places, columns), with zeros for parameters that this use does without.

        `lead` is (examples, places, 1).
        """
        parts: list[Tensor | Inputs] = []
        for i, p in enumerate(unit.parameters):
            x = columns.get(i)
            if isinstance(x, Tensor):
                parts.append(by_example(x.detach().to(unit.dtype), self._count, dim))
            elif x is not None:
                parts.append(x if x.shape[0] == len(lead) else Regrouped(x, len(lead)))
            else:
                value = 1.0 if i in columns else 0.0
                width = p.numel() // unit.rows
                ones = lead.new_full((), value, dtype=unit.dtype)
                parts.append(ones.expand(*lead.shape[:2], width))
        if len(parts) == 1:
            return parts[0]
        first, *rest = parts
        tensors = [x for x in rest if isinstance(x, Tensor)]
        if isinstance(first, Tensor):
            return torch.cat([first, *tensors], dim=-1)
        return Augmented(first, tensors)

    def _source(self, factors: Sequence[tuple[Tensor | None, Factor]]) -> Tensor | None:
        tensors = (x for _, x in factors if self._keep and isinstance(x, Tensor))
        return next(tensors, None)


def _reduces(block: Block) -> bool:
    """Whether a block takes the places of an example together."""
    return any(getattr(b, "sharing", "") == "reduce" for b in (block, *vars(block).values()))


def _transposed_tap(
    x: Tensor | Inputs,
    padding: tuple[int, int],
    counts: Tensor | None,
    examples: int,
    dim: int | None,
    g: Tensor,
) -> Tap:
    grads = by_example(g, examples, dim)
    if counts is not None:  # every place of a bag has the gradient of its sum
        each = counts.shape[1] // grads.shape[1]
        grads = grads.unsqueeze(2).expand(-1, -1, each, -1).flatten(1, 2)
    if any(padding):  # columns of V that this use does without
        grads = torch.nn.functional.pad(grads, padding)
    return Tap(x, grads, counts, transposed=True)


def _grouped_tap(
    x: Tensor, arrange: Arrange, examples: int, dim: int | None, g: Tensor
) -> GroupedTap:
    by_group = (torch.stack([by_example(t, examples, dim) for t in u]) for u in (x, arrange(g)))
    return GroupedTap(*by_group)


def _elementwise_tap(
    unit: Unit, columns: dict[int, Elementwise], examples: int, dim: int | None, g: Tensor
) -> AnyTap:
    values = [
        columns[i].gradients(g, p, examples, dim) if i in columns else None
        for i, p in enumerate(unit.parameters)
    ]
    only = values[0]
    plain = only is not None and len(values) == 1 and columns[0].x is None
    if plain and only is not None and unit.shape[1] > 1 and columns[0].derived is None:
        # Every row of V was added once: V looked up at all its rows, as an embedding is.
        rows, width = unit.shape
        hot = OneHot(torch.arange(rows, device=g.device).expand(len(only), rows), rows, g.dtype)
        return Tap(hot, only.reshape(len(only), rows, width), transposed=True)
    return ElementwiseTap(unit.join_examples(values))
