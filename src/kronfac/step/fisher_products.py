"""uᵀFv for a few vectors from their J v alone, and F v [MG15 App. C].

F = Σ_t s w_t J_tᵀ F_R J_t, so uᵀFv = Σ_t s w_t (J_t u)ᵀ F_R (J_t v): J v of all directions, and no
backward pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.distributed import ALONE, World
from kronfac.linearize import Linearizer
from kronfac.model import Matrices, Network
from kronfac.record import Batch


def fisher_gram(
    network: Network,
    batch: Batch,
    directions: Sequence[Matrices],
    factor: float = 1.0,
    around: Linearizer | None = None,
    world: World = ALONE,
) -> Tensor:
    """The matrix of v_iᵀ F v_j for all pairs of directions, (k, k), float64, on the device.

    Args:
        network: whose Fisher it is.
        batch: the examples, S₂.
        directions: the vectors.
        factor: what the terms count: examples of the whole mini-batch over those of S₂.
        around: what statistics on the same examples have kept.
        world: the ranks that each have a part of the examples.
    """
    around = around or Linearizer(network)
    gram: Tensor | None = None
    for part in batch.passes:
        view = around(part)
        tangents = view.jvp(directions)
        for terms, z, Jv in zip(part.terms, view.outputs, tangents, strict=True):
            scale = terms.scale or 1.0
            FJv = terms.weigh(terms.likelihood.fisher_product(z, Jv), scale)
            own = (Jv.flatten(1) @ FJv.flatten(1).mT).double().mul_(scale)
            gram = own if gram is None else gram.add_(own)
    assert gram is not None
    if world.size > 1:
        totals = world.total(gram.flatten().tolist(), "fisher")
        gram = torch.tensor(totals, dtype=gram.dtype, device=gram.device).view_as(gram)
    # Symmetric up to rounding: F_R is applied to one side only.
    return (gram + gram.mT).mul_(factor / 2)


def fisher_product(
    network: Network,
    batch: Batch,
    vector: Matrices,
    factor: float = 1.0,
    around: Linearizer | None = None,
    world: World = ALONE,
) -> Matrices:
    """F v = Jᵀ F_R J v: the forward-mode pass, and a backward pass from F_R J v."""
    around = around or Linearizer(network)
    total = tuple(torch.zeros_like(V) for V in vector)
    for part in batch.passes:
        view = around(part)
        products = [
            terms.weigh(terms.likelihood.fisher_product(z, Jv[0]))
            for terms, z, Jv in zip(part.terms, view.outputs, view.jvp([vector]), strict=True)
        ]
        for sum_, V in zip(total, view.vjp(products), strict=True):
            sum_.add_(V, alpha=factor)
    world.sum(total, "fisher")
    return total
