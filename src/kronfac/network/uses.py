"""The uses of all units in one forward pass of K-FAC's own.

Observers of torch functions (`functions.py`) and hooks on modules whose adapter says itself how it uses its
parameters record here: the inputs of every use without a graph, and where its outputs are in the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from kronfac.curvature import AnyTap, ElementwiseTap, GroupedTap, Inputs, OneHot, Tap
from kronfac.network.augmented import Augmented
from kronfac.network.by_example import (
    PLAIN,
    Arrange,
    Elementwise,
    Layout,
    Order,
    by_example,
)
from kronfac.network.find import Site
from kronfac.network.regrouped import Regrouped, Views
from kronfac.network.unit import Unit

Factor = Tensor | Inputs | None
"""What a parameter was multiplied with; None stands for ones."""


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
        keep_sources: whether to keep the inputs with their graph.
        dim: the dimension that the examples are along, in what the model was called with.
    """

    def __init__(
        self, units: Sequence[Unit], examples: int, keep_sources: bool = False, dim: int = 0
    ) -> None:
        self.units, self.examples = units, examples
        self.order = Order(dim)
        """Where the function that is running has the examples."""
        self.edges: list[GradientEdge] = []
        """Where the outputs of the uses entered the graph. Edges, not tensors: an activation may overwrite
        the outputs, after which the tensor stands for something else."""
        self.outputs: list[torch.Size] = []
        self.summed = False
        """Whether outputs of a use have no dimension of examples: gradients are then summed over them."""
        self._like: list[Tensor] = []
        self.of: list[list[Recorded]] = [[] for _ in units]
        """The uses of every unit."""
        self._keep = keep_sources
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
            found.append(use.tap(g.detach().to(self.units[unit].dtype)))
        return found

    @property
    def half_precision(self) -> bool:
        """Whether some outputs have few digits: a model may have an autocast of its own."""
        return any(like.dtype in (torch.float16, torch.bfloat16) for like in self._like)

    def by_example(self, x: Tensor) -> Tensor:
        """(examples, places, features) from (…, features)."""
        return by_example(x, self.examples, first=self.order)

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
        edge = self._edge(outputs, layout) if found else 0
        for n, columns in found.items():
            unit = self.units[n]
            x = self._columns(unit, columns, outputs, layout)
            tap = partial(_product_tap, x, layout, unit.rows, self.examples, self.order)
            self.of[n].append(Recorded(edge, tap, self._source([(None, source), *factors])))

    def transposed(
        self,
        outputs: Tensor,
        weight: Tensor,
        x: Tensor | Inputs,
        counts: Tensor | None = None,
    ) -> None:
        """outputs = Pᵀ x, with x (…, len(P)) or `Inputs` over the rows of P.

        With `counts`, (examples, places), they are the sum over those places of every example.
        """
        if self.swapped(weight):
            self.product(outputs, [(weight, x)])
            return
        for n, columns in self._by_unit(outputs, [(weight, x)]).items():
            unit, (i,) = self.units[n], columns
            inputs = self.by_example(x.detach().to(unit.dtype)) if isinstance(x, Tensor) else x
            start = sum(p.numel() for p in unit.parameters[:i]) // unit.rows
            stop = start + unit.parameters[i].numel() // unit.rows
            padding = (start, unit.shape[1] - stop)
            # Not a method of this object, which would hold itself, and with it the graph.
            arrange = partial(by_example, examples=self.examples, first=self.order)
            tap = partial(_transposed_tap, inputs, padding, counts, arrange)
            self.of[n].append(Recorded(self._edge(outputs), tap, self._source([(weight, x)])))

    def swapped(self, weight: Tensor) -> bool:
        """Whether a parameter is stored as (in, out, …), and stands in V as its transpose."""
        return id(weight) in self._place and self.units[self._place[id(weight)][0]].swapped > 0

    def grouped(
        self,
        outputs: Tensor,
        factors: Sequence[tuple[Tensor | None, Factor]],
        arrange: Arrange,
        source: Tensor,
    ) -> None:
        """The same as `product` for rows in groups: x is (groups, examples, places, columns)."""
        found = self._by_unit(outputs, factors)
        edge = self._edge(outputs, Layout(arrange, dim=1)) if found else 0
        for n, columns in found.items():
            unit, lead = self.units[n], arrange(outputs.detach())
            parts = []
            for i, p in enumerate(unit.parameters):
                x = columns.get(i)
                if not isinstance(x, Tensor):  # a bias, or a parameter that this use does without
                    value, width = 1.0 if i in columns else 0.0, p.numel() // unit.rows
                    x = lead.new_full((), value).expand(*lead.shape[:-1], width)
                parts.append(x.detach().to(unit.dtype))
            x = torch.cat(parts, dim=-1)
            tap = partial(_grouped_tap, x, arrange, self.examples, self.order)
            self.of[n].append(Recorded(edge, tap, source if self._keep else None))

    def elementwise(
        self, outputs: Tensor, factors: Sequence[tuple[Tensor | None, Elementwise]]
    ) -> None:
        """outputs = Σ_p P ⊙ x_p for pairs of P and x_p."""
        found = self._by_unit(outputs, factors)
        edge = self._edge(outputs) if found else 0
        for n, columns in found.items():
            tap = partial(_elementwise_tap, self.units[n], columns, self.examples, self.order)
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
        empty = not outputs.numel() and self.examples  # an expert that no example was sent to
        if empty or not outputs.requires_grad:
            return found
        for p, x in factors:
            if p is not None and id(p) in self._place:
                n, i = self._place[id(p)]
                found.setdefault(n, {})[i] = x
        return found

    def _edge(self, outputs: Tensor, layout: Layout = PLAIN) -> int:
        self.summed = self.summed or not layout.has_examples(outputs, self.examples, self.order)
        self.edges.append(get_gradient_edge(outputs))
        self.outputs.append(outputs.shape)
        self._like.append(outputs.new_empty(0))
        return len(self.edges) - 1

    def _columns(
        self, unit: Unit, columns: dict[int, Factor], outputs: Tensor, layout: Layout
    ) -> Tensor | Inputs:
        """ā, (examples, places, columns), with zeros for parameters that this use does without."""
        parts: list[Tensor | Inputs] = []
        lead = layout.by_example(
            layout.arranged(outputs.detach())[..., :1], self.examples, self.order
        )
        for i, p in enumerate(unit.parameters):
            x = columns.get(i)
            if isinstance(x, Tensor):
                parts.append(
                    layout.by_example(x.detach().to(unit.dtype), self.examples, self.order)
                )
            elif x is not None:
                parts.append(x if x.shape[0] == len(lead) else self._regrouped(x, len(lead)))
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

    def _regrouped(self, x: Inputs, examples: int) -> Inputs:
        """Inputs by the network's examples, of which each has several."""
        if self.order == Order.VIEWS and examples == self.examples:
            return Views.of(x, examples)
        return Regrouped(x, examples)

    def _source(self, factors: Sequence[tuple[Tensor | None, Factor]]) -> Tensor | None:
        tensors = (x for _, x in factors if self._keep and isinstance(x, Tensor))
        return next(tensors, None)


def _product_tap(
    x: Tensor | Inputs, layout: Layout, rows: int, examples: int, first: int, g: Tensor
) -> Tap:
    return Tap(x, layout.grads(g, examples, rows, first), layout.counted(examples, first))


def _transposed_tap(
    x: Tensor | Inputs,
    padding: tuple[int, int],
    counts: Tensor | None,
    by_example: Arrange,
    g: Tensor,
) -> Tap:
    grads = by_example(g) if counts is None else g.unsqueeze(1).expand(*counts.shape, -1)
    if any(padding):  # columns of V that this use does without
        grads = torch.nn.functional.pad(grads, padding)
    return Tap(x, grads, counts, transposed=True)


def _grouped_tap(x: Tensor, arrange: Arrange, examples: int, first: int, g: Tensor) -> GroupedTap:
    by_group = (
        torch.stack([by_example(t, examples, 0, first=first) for t in u]) for u in (x, arrange(g))
    )
    return GroupedTap(*by_group)


def _elementwise_tap(
    unit: Unit, columns: dict[int, Elementwise], examples: int, dim: int, g: Tensor
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
