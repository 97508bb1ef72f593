"""From the gradient at the outputs of a use to its tap: where the examples, places and rows are.

Examples are along the first dimension, unless the layer says otherwise (attention and recurrent layers have
time first inside) or a check has shown otherwise (`record/examples.py`). Outputs that have no dimension of
examples, such as the rows of a table of positions, count as those of one example: their gradient is the sum
over all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kronfac.curvature import AnyTap, ElementwiseTap, GroupedTap, Inputs, OneHot, Tap
from kronfac.model.network import Unit

Arrange = Callable[[Tensor], Tensor]


def has_examples(lead: Sequence[int], examples: int, dim: int | None) -> bool:
    """Whether a dimension has the examples, or several entries of each."""
    return dim is not None and dim < len(lead) and lead[dim] % max(examples, 1) == 0


def by_example(x: Tensor, examples: int, dim: int | None) -> Tensor:
    """(examples, places, features) from (…, features); (1, places, features) if no dimension has them.

    The dimension may also have several entries of each example, one after the other: (examples · k, …).
    """
    if not has_examples(x.shape[:-1], examples, dim):
        return x.reshape(1, -1, x.shape[-1])
    assert dim is not None
    moved = x.movedim(dim, 0)
    places = moved.numel() // max(examples * x.shape[-1], 1)
    return moved.reshape(examples, places, x.shape[-1])


@dataclass(frozen=True)
class Layout:
    """The layout of the outputs of a product."""

    arrange: Arrange | None = None
    """Makes (…, rows) of a tensor of the outputs' shape, if that is another."""
    dim: int | None = None
    """The dimension of (…, rows) that has the examples, if the layer knows it."""
    first_row: int = 0
    """The first row of V that was multiplied, if only some were."""
    counts: Tensor | None = None
    """Which places count, in the dimensions in front of the rows, bool: padding does not; None for all."""

    def arranged(self, outputs: Tensor) -> Tensor:
        """(…, rows)."""
        return outputs if self.arrange is None else self.arrange(outputs)


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
        summed = _sum_to_shape(product, self.shape, examples, dim)
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


def _sum_to_shape(x: Tensor, shape: torch.Size, examples: int, dim: int | None) -> Tensor:
    """x summed to a shape that is broadcast to its own, but for the examples: (examples or 1, *shape)."""
    full = torch.Size((1,) * (x.dim() - len(shape)) + tuple(shape))
    if dim is not None and has_examples(x.shape, examples, dim) and full[dim] == 1:
        each = x.shape[dim] // max(examples, 1)
        moved = x.unflatten(dim, (examples, each)).movedim(dim, 0)
    else:
        moved = x.unsqueeze(0)
    over = [d + 1 for d, size in enumerate(full) if size == 1 and moved.shape[d + 1] != 1]
    summed: Tensor = moved.sum(dim=over, keepdim=True) if over else moved
    return summed.reshape(len(moved), *shape)


# ---------------------------------------------------------------------------------------------- taps
#
# From the arguments that are known in the forward pass and g, the gradient at the outputs.


def product_tap(
    layout: Layout, x: Tensor | Inputs, rows: int, examples: int, dim: int | None, g: Tensor
) -> Tap:
    """The tap of V ā, with V of so many rows."""
    grads = by_example(layout.arranged(g), examples, dim)
    after = rows - layout.first_row - grads.shape[-1]
    if layout.first_row or after:  # rows that were not used
        grads = functional.pad(grads, (layout.first_row, after))
    counts = layout.counts
    if counts is not None:
        counts = by_example(counts.unsqueeze(-1), examples, dim).squeeze(-1)
    return Tap(x, grads, counts)


def transposed_tap(
    padding: tuple[int, int],
    counts: Tensor | None,
    x: Tensor | Inputs,
    examples: int,
    dim: int | None,
    g: Tensor,
) -> Tap:
    """The tap of Vᵀ ā; `padding` are the numbers of columns of V before and after those that were used."""
    grads = by_example(g, examples, dim)
    if counts is not None:  # every place of a bag has the gradient of its sum
        each = counts.shape[1] // grads.shape[1]
        grads = grads.unsqueeze(2).expand(-1, -1, each, -1).flatten(1, 2)
    if any(padding):
        grads = functional.pad(grads, padding)
    return Tap(x, grads, counts, transposed=True)


def grouped_tap(
    arrange: Arrange, x: Tensor, examples: int, dim: int | None, g: Tensor
) -> GroupedTap:
    """The tap of rows in groups, with x and arranged outputs (groups, …, columns or rows)."""
    by_group = (torch.stack([by_example(t, examples, dim) for t in u]) for u in (x, arrange(g)))
    return GroupedTap(*by_group)


def elementwise_tap(
    unit: Unit, columns: dict[int, Elementwise], examples: int, dim: int | None, g: Tensor
) -> AnyTap:
    """The tap of parameters, by their numbers in the unit, that numbers are multiplied with one by one."""
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
