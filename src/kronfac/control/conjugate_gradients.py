"""More than one preconditioned CG step on the quadratic model: Hessian-free optimisation [MG15 §6.4].

K-FAC's re-scaled update is the first iterate of conjugate gradients on M(δ), preconditioned by the
approximate Fisher. Going on from there brings δ closer to the minimiser of M, at the cost of a product
with the exact Fisher for every further step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kronfac.control.base import ParameterVector
from kronfac.control.quadratic_form import model_change
from kronfac.control.quadratic_model import QuadraticModel, minimiser
from kronfac.vector import dot


@dataclass(frozen=True)
class ConjugateGradients(QuadraticModel):
    """`QuadraticModel`, then `cg_steps` − 1 further steps of preconditioned conjugate gradients.

    With `momentum=False` the result is the cg_steps-th iterate from δ = 0.
    """

    cg_steps: int = 10

    def __post_init__(self) -> None:
        if self.cg_steps < 1:
            raise ValueError(f"ConjugateGradients needs at least one step; got {self.cg_steps}.")


def refine(
    delta: ParameterVector,
    gradient: ParameterVector,
    product: Callable[[ParameterVector], ParameterVector],
    precondition: Callable[[ParameterVector], ParameterVector],
    steps: int,
) -> tuple[ParameterVector, float]:
    """δ after further steps towards the minimiser of ½ δᵀBδ + ∇hᵀδ, and by how much that fell.

    Each step minimises over the preconditioned residual z and the last change p of δ, which is what
    conjugate gradients do; p starts as δ itself, the change from 0.

    Args:
        delta: where to start, a minimiser along its own direction.
        gradient: ∇h.
        product: v ↦ B v with B = F + (λ + η) I.
        precondition: r ↦ F⁰⁻¹ r.
        steps: how many.
    """
    total = 0.0
    p, Bp = delta, product(delta)
    residual = tuple(map(torch.add, gradient, Bp))
    for _ in range(steps):
        z = tuple(U.neg() for U in precondition(residual))
        Bz = product(z)
        products = [dot(z, Bz), dot(z, Bp), dot(p, Bp), dot(z, residual), dot(p, residual)]
        zBz, zBp, pBp, *r = torch.stack(products).tolist()
        Q = [[zBz, zBp], [zBp, pBp]]
        a, b = minimiser(Q, r, torch.finfo(z[0].dtype).eps)
        change = model_change(Q, r, (a, b))
        # At the minimiser, or as near to it as rounding lets one get.
        if not change < 0:
            break
        total += change
        p, Bp = (
            tuple(U * a + V * b for U, V in zip(new, old, strict=True))
            for new, old in ((z, p), (Bz, Bp))
        )
        delta = tuple(map(torch.add, delta, p))
        residual = tuple(map(torch.add, residual, Bp))
    return delta, total
