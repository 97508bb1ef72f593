"""The exact Fisher, dense [MG15 §3]: F_ij = E[ā_i ā_jᵀ ⊗ g_i g_jᵀ].

An entry is E[ā⁽¹⁾ ā⁽²⁾ g⁽¹⁾ g⁽²⁾]. Taken as (Jᵀ F_R J) with the Jacobian of all weights it would cost
examples · outputs · weights² multiplications. Here the sum over y comes first, so that a pair of layers
takes one product of (examples, in·in') with (examples, out·out'): no factor for the outputs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from kronfac.linalg import symmetrize
from kronfac_experiments.diagnostics.block_matrix import (
    MAX_GIGABYTES,
    BlockMatrix,
    check_size,
    filled,
)
from kronfac_experiments.diagnostics.cases import Cases, Inputs, add


def exact_fisher(
    model: nn.Module,
    loss: nn.Module,
    x: Inputs,
    *,
    layers: Sequence[str] | None = None,
    chunk: int | None = None,
    max_gigabytes: float = MAX_GIGABYTES,
) -> BlockMatrix:
    """F = c E_x[Jᵀ F_R J] over the examples x, c being the objective's scale (1 for a mean loss).

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> F = exact_fisher(model, nn.CrossEntropyLoss(), torch.randn(50, 3))
        >>> F.dense.shape, F.names, F.sizes
        (torch.Size([26, 26]), ('0', '2'), (16, 10))

    Args:
        model: any that `KFAC` accepts; evaluated in float64, in a copy.
        loss: any that `KFAC` accepts.
        x: inputs, or a tuple of them; targets play no part in the Fisher.
        layers: names of the layers, in the order of the blocks; None for all trained ones, in the
            order of the chain if the model is one.
        chunk: examples at a time; None for what takes some 64 MB.
        max_gigabytes: refuse if the dense matrices would take more.

    Raises:
        TooLargeError: they would.
    """
    cases = Cases(model, loss, x, layers, chunk)
    check_size("exact_fisher", cases.sizes, matrices=4, max_gigabytes=max_gigabytes)
    return fourth_moments(cases)


def fourth_moments(cases: Cases, means: Sequence[Tensor] | None = None) -> BlockMatrix:
    """E[ā⁽¹⁾ ā⁽²⁾ g⁽¹⁾ g⁽²⁾] for all pairs of weights, with ā less `means` if these are given."""
    pairs = [(i, j) for j in range(len(cases.layers)) for i in range(j + 1)]
    sums: dict[tuple[int, int], Tensor] = {}
    for chunk in cases:
        a = [c.a if means is None else c.a - means[i] for i, c in enumerate(chunk)]
        for i, j in pairs:
            A, G = outer_products(a[i], a[j]), summed_products(chunk[i].g, chunk[j].g)
            add(sums, (i, j), A.mT @ G)

    def block(i: int, j: int) -> Tensor:
        if i > j:
            return block(j, i).mT
        moments = _as_block(sums[i, j] / cases.count, cases.shapes[i], cases.shapes[j])
        return symmetrize(moments) if i == j else moments

    return filled(cases.names, cases.sizes, block, like=sums[0, 0])


def outer_products(u: Tensor, v: Tensor) -> Tensor:
    """u vᵀ of every example, flattened: (examples, p · q)."""
    return torch.einsum("cp,cq->cpq", u, v).flatten(1)


def summed_products(g: Tensor, h: Tensor) -> Tensor:
    """E_y[g hᵀ] = Σ_k g⁽ᵏ⁾ h⁽ᵏ⁾ᵀ of every example, flattened: (examples, out · out')."""
    return torch.einsum("kcp,kcq->cpq", g, h).flatten(1)


def _as_block(moments: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """(in · in', out · out') to (in · out, in' · out'), the layout of ā ⊗ g = vec(g āᵀ)."""
    (out, in_), (out_, in__) = rows, columns
    return moments.view(in_, in__, out, out_).permute(0, 2, 1, 3).reshape(in_ * out, in__ * out_)
