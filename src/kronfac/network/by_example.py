"""Which dimension of a tensor inside the network has the examples, and sums over all others.

Layers are called with (examples, …), (time, examples, …) or (examples · time, …). An operation on something
that is the same for all examples, such as the table of positions, has none of them: there the gradient is
summed over the examples, and counts as that of one.
"""

import torch
from torch import Tensor


def by_example(x: Tensor, examples: int, *, first: int = 0) -> Tensor:
    """(examples, places, features) from (…, features); (1, places, features) if it has no examples.

    `first` is the dimension that the model's own arguments have them along, 0 or 1, which is tried first.
    """
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
