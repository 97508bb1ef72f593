"""Which dimension of a tensor inside the network has the examples, and sums over all others.

Layers are called with (examples, …), (time, examples, …) or (examples · time, …). An operation on something
that is the same for all examples, such as the table of positions, has none of them: there the gradient is
summed over the examples, and counts as that of one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Arrange = Callable[[Tensor], Tensor]


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

    def has_examples(self, outputs: Tensor, examples: int) -> bool:
        """Whether the examples are among the outputs' dimensions."""
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
    """
    if dim is not None:
        moved = x.movedim(dim, 0)
        count = (examples or len(moved)) if len(moved) % max(examples, 1) == 0 else 1
        return moved.reshape(count, -1, x.shape[-1])
    if x.dim() == 1:
        return x.view(1, 1, -1)
    lead = x.shape[:-1]
    in_order = first == 0 or len(lead) == 1 or lead[1] != examples
    if (lead[0] == examples and in_order) or examples == 0:
        return x.reshape(lead[0], -1, x.shape[-1])
    if len(lead) > 1 and lead[1] == examples:
        return x.transpose(0, 1).reshape(examples, -1, x.shape[-1])
    if lead[0] % examples == 0:
        if first:  # (time · examples, …)
            x = x.reshape(-1, examples, *x.shape[1:]).transpose(0, 1)
        return x.reshape(examples, -1, x.shape[-1])
    return x.reshape(1, -1, x.shape[-1])


def sum_to_shape(x: Tensor, shape: torch.Size, examples: int, *, first: int = 0) -> Tensor:
    """x summed to a shape that is broadcast to its own, but for the examples: (examples, *shape)."""
    full = torch.Size((1,) * (x.dim() - len(shape)) + tuple(shape))
    order = (1, 0) if first else (0, 1)
    dim = next((d for d in order if d < x.dim() and x.shape[d] == examples and full[d] == 1), None)
    if dim is not None:
        moved, target = x.movedim(dim, 0), full[:dim] + full[dim + 1 :]
    elif x.dim() and full[0] == 1 and examples and x.shape[0] % examples == 0:
        apart = x.unflatten(0, (-1, examples) if first else (examples, -1))
        moved, target = apart.transpose(0, 1) if first else apart, full  # (examples · time, …)
    else:
        moved, target = x.unsqueeze(0), full
    over = [d + 1 for d, size in enumerate(target) if size == 1 and moved.shape[d + 1] != 1]
    summed = moved.sum(dim=over, keepdim=True) if over else moved
    return summed.reshape(len(moved), *shape)
