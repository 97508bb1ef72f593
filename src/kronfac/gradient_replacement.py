"""Gradients replaced by preconditioned ones, in place, for an optimizer that comes after."""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kronfac.curvature import DampedInverse, InputBlock, KroneckerBlock
from kronfac.network import Matrices, Unit, dot

Schedule = float | Callable[[int], float]
"""A number, or one for every count of steps taken."""


def replace_gradients(
    units: Sequence[Unit],
    inverse: DampedInverse,
    factor: Callable[[Matrices, Matrices], float],
    agree: Callable[[], None],
) -> None:
    """p.grad ← ν F̆⁻¹ p.grad, with ν = factor(g, Δ) from the gradient before and after.

    A parameter without a gradient counts as one of zero, and stays without. `agree` is called when all is
    computed and nothing written yet.
    """
    gradient = tuple(
        unit.join([torch.zeros_like(p) if p.grad is None else p.grad for p in unit.parameters])
        for unit in units
    )
    direction = inverse.mv(gradient)
    nu = factor(gradient, direction)
    agree()
    for unit, V in zip(units, direction, strict=True):
        for p, part in zip(unit.parameters, unit.split(V), strict=True):
            if p.grad is not None:
                p.grad.copy_(part if nu == 1 else part * nu)


def clip_factor(gradient: Matrices, direction: Matrices, kappa: float, lr: float) -> float:
    """ν = min(1, √(κ / (lr² gᵀΔ))), by which lr² Δᵀ F̆ Δ of the step is at most κ."""
    length = lr**2 * abs(float(dot(gradient, direction)))
    return min(1.0, math.sqrt(kappa / length)) if length else 1.0


def input_block(unit: Unit) -> InputBlock:
    """The input side of a unit's Kronecker product; if it has none, its gradient stays as it is."""
    block = unit.block if unit.observed and isinstance(unit.block, KroneckerBlock) else None
    return InputBlock(*unit.shape, block)


def finite(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all numbers are, asked once."""
    sums = [t.sum(dtype=torch.float64).cpu() for t in tensors if t is not None]
    return not sums or bool(torch.stack(sums).isfinite().all())


def scheduled(name: str, given: Schedule, steps: int) -> float:
    """The value of a schedule.

    Raises:
        ValueError: it is not positive and finite.
    """
    value = given(steps) if callable(given) else given
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(
            f"Preconditioner's {name} is a positive number, or a function from the number of steps to one; "
            f"got {value!r}."
        )
    return float(value)
