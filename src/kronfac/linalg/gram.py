"""xᵀx at half of its multiplications: it is symmetric."""

import torch
from torch import Tensor

STRIP = 192
"""Rows of the product that are computed at a time on a CPU: fewer make small products, more waste half of
each on the diagonal. Measured for 250 to 1,000 vectors of 400 to 1,600 numbers."""


def add_gram(total: Tensor | None, x: Tensor, decay: float, weight: float) -> Tensor:
    """decay · total + weight · xᵀx, (n, n), for x (vectors, n) and a symmetric `total`, or None for zeros.

    Strip by strip, each up to the diagonal and then copied to its mirror image. A GPU would rather have the
    whole of it at once.
    """
    n = x.shape[1]
    strips = round(n / STRIP) if x.device.type == "cpu" else 1
    if strips < 2:
        if total is None:
            return (x.mT @ x).mul_(weight)
        return torch.addmm(total, x.mT, x, beta=decay, alpha=weight)
    result = x.new_empty(n, n)
    for strip in range(strips):
        start, stop = strip * n // strips, (strip + 1) * n // strips
        own, left, right = result[start:stop, :stop], x[:, start:stop].mT, x[:, :stop]
        if total is None:
            own.addmm_(left, right, beta=0, alpha=weight)  # β = 0 reads nothing of what was there
        else:
            before = total[start:stop, :stop]
            torch.addmm(before, left, right, beta=decay, alpha=weight, out=own)
        result[:start, start:stop] = own[:, :start].mT
    return result
