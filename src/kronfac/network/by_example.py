"""Which dimension of a tensor inside the network has the examples, and sums over all others.

Layers are called with (examples, …), (time, examples, …), (examples · time, …), or with views of all
examples after one another, (views · examples, …). An operation on something
that is the same for all examples, such as the table of positions, has none of them: there the gradient is
summed over the examples, and counts as that of one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

Arrange = Callable[[Tensor], Tensor]


class Order(IntEnum):
    """Where the examples are, if several dimensions could have them."""

    FIRST = 0
    """In the first dimension, each with all that belongs to it: (examples · time, …)."""
    SECOND = 1
    """In the second dimension: (time, examples, …), or (time · examples, …)."""
    VIEWS = 2
    """All of them, several times after one another: (views · examples, …)."""
    NONE = 3
    """Nowhere, whatever the sizes are: a table that is the same for all."""


@dataclass(frozen=True)
class Layout:
    """What is known of the layout of a use's outputs, beyond what their shape shows."""

    arrange: Arrange | None = None
    """Makes (…, rows) of a tensor of the outputs' shape, if that is another."""
    dim: int | None = None
    """The dimension of (…, rows) that has the examples; None to find it by its size."""
    first_row: int = 0
    """The first row of V that was multiplied, if only some were."""
    counts: Tensor | None = None
    """Which places count, in the dimensions in front of the rows, bool: padding does not; None for all."""

    def arranged(self, outputs: Tensor) -> Tensor:
        """(…, rows)."""
        return outputs if self.arrange is None else self.arrange(outputs)

    def by_example(self, x: Tensor, examples: int, first: int = 0) -> Tensor:
        """(examples, places, features) from (…, features)."""
        return by_example(x, examples, self.dim, first=first)

    def grads(self, g: Tensor, examples: int, rows: int, first: int = 0) -> Tensor:
        """(examples, places, rows of V) from gradients at the outputs, zero in rows that were not used."""
        grads = self.by_example(self.arranged(g), examples, first)
        after = rows - self.first_row - grads.shape[-1]
        if self.first_row or after:
            grads = torch.nn.functional.pad(grads, (self.first_row, after))
        return grads

    def counted(self, examples: int, first: int = 0) -> Tensor | None:
        """The places that count, (examples, places)."""
        if self.counts is None:
            return None
        return self.by_example(self.counts.unsqueeze(-1), examples, first).squeeze(-1)

    def has_examples(self, outputs: Tensor, examples: int, first: int = 0) -> bool:
        """Whether the examples are among the outputs' dimensions."""
        if first == Order.NONE:
            return False
        if self.dim is None:
            return _has_examples(outputs.shape, examples)
        return self.arranged(outputs).shape[self.dim] % max(examples, 1) == 0


def _has_examples(shape: torch.Size, examples: int) -> bool:
    return examples in shape[:2] or (len(shape) > 0 and shape[0] % max(examples, 1) == 0)


PLAIN = Layout()


def by_example(x: Tensor, examples: int, dim: int | None = None, *, first: int = 0) -> Tensor:
    """(examples, places, features) from (…, features); (1, places, features) if it has no examples.

    `dim` is the dimension that has them, if it is known; it may also have several entries of each, one
    after the other. Else the one that the model's own arguments have them along is tried `first`, 0 or 1.
    `first` is any `Order`.
    """
    if first == Order.NONE or (dim is None and x.dim() == 1):
        return x.reshape(1, -1, x.shape[-1])
    if first == Order.VIEWS and (found := _of_views(x, examples, dim)) is not None:
        return found
    if dim is not None:
        moved = x.movedim(dim, 0)
        count = (examples or len(moved)) if len(moved) % max(examples, 1) == 0 else 1
        return moved.reshape(count, -1, x.shape[-1])
    lead = x.shape[:-1]
    in_order = first != Order.SECOND or len(lead) == 1 or lead[1] != examples
    if (lead[0] == examples and in_order) or examples == 0:
        return x.reshape(lead[0], -1, x.shape[-1])
    if len(lead) > 1 and lead[1] == examples:
        return x.transpose(0, 1).reshape(examples, -1, x.shape[-1])
    count = examples if lead[0] % examples == 0 else 1
    if count > 1 and first == Order.SECOND:  # (time · examples, …)
        x = x.reshape(-1, examples, *x.shape[1:]).transpose(0, 1)
    return x.reshape(count, -1, x.shape[-1])


def _of_views(x: Tensor, examples: int, dim: int | None) -> Tensor | None:
    """(examples, views · places, features), if one of the first two dimensions has views of them."""
    dims = range(min(x.dim() - 1, 2)) if dim is None else [dim]
    found = next((d for d in dims if _views(x.shape[d], examples)), None)
    if found is None:
        return None
    moved = x.movedim(found, 0)
    apart = moved.reshape(len(moved) // examples, examples, -1).transpose(0, 1)
    return apart.reshape(examples, -1, x.shape[-1])


def _views(size: int, examples: int) -> bool:
    """Whether a dimension has several views of all examples."""
    return examples > 0 and size > examples and size % examples == 0


def sum_to_shape(x: Tensor, shape: torch.Size, examples: int, *, first: int = 0) -> Tensor:
    """x summed to a shape that is broadcast to its own, but for the examples: (examples, *shape)."""
    full = torch.Size((1,) * (x.dim() - len(shape)) + tuple(shape))
    if first == Order.VIEWS and not (x.dim() and full[0] == 1 and _views(x.shape[0], examples)):
        first = Order.FIRST
    order = (1, 0) if first else (0, 1)
    dim = next((d for d in order if d < x.dim() and x.shape[d] == examples and full[d] == 1), None)
    if first == Order.NONE:
        moved, target = x.unsqueeze(0), full
    elif dim is not None and first != Order.VIEWS:
        moved, target = x.movedim(dim, 0), full[:dim] + full[dim + 1 :]
    elif x.dim() and full[0] == 1 and examples and x.shape[0] % examples == 0:
        apart = x.unflatten(0, (-1, examples) if first else (examples, -1))
        moved, target = apart.transpose(0, 1) if first else apart, full  # (examples · time, …)
    else:
        moved, target = x.unsqueeze(0), full
    over = [d + 1 for d, size in enumerate(target) if size == 1 and moved.shape[d + 1] != 1]
    summed = moved.sum(dim=over, keepdim=True) if over else moved
    return summed.reshape(len(moved), *shape)


@dataclass(frozen=True)
class Elementwise:
    """How one parameter enters a product of numbers one by one."""

    x: Tensor | None
    """What it is multiplied with, in the shape of the outputs; None stands for ones."""
    shape: torch.Size
    """The shape that it is broadcast from."""
    derived: Tensor | None = None
    """What was computed from it and is used in its place."""

    def gradients(self, g: Tensor, p: Tensor, examples: int, first: int) -> Tensor:
        """The gradient of every example, (examples, *p.shape), from that at the outputs."""
        product = g if self.x is None else g * self.x
        summed = sum_to_shape(product, self.shape, examples, first=first)
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
