"""The curvature of losses in what they are called with, by definition; nothing here imports kronfac.

E_y[g gᵀ] over targets y of the predictive distribution, g = ∂(−log r)/∂z from autograd, or a formula.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def second_moment(nll: Callable[[Tensor, Tensor], Tensor], z: Tensor, law: Any) -> Tensor:
    """E_y[g gᵀ] of one output or one group of outputs z, `law` giving pairs of a target and its weight."""
    total = torch.zeros(z.numel(), z.numel(), dtype=z.dtype)
    for y, probability in law:
        leaf = z.detach().clone().requires_grad_()
        (g,) = torch.autograd.grad(nll(leaf, y), leaf)
        total += probability * torch.outer(g.flatten(), g.flatten())
    return total


def number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def bernoulli_law(p: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(number(0), 1 - p), (number(1), p)]


def poisson_law(rate: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Up to a count whose probability is below the rounding error."""
    log = [k * rate.log() - rate - math.lgamma(k + 1) for k in range(150)]
    return [(number(k), value.exp()) for k, value in enumerate(log)]


def normal_law(mean: Tensor, variance: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Gauss–Hermite quadrature with five nodes, exact for the polynomials of degree 9 in y."""
    s = math.sqrt(10)
    nodes = [0, math.sqrt(5 - s), -math.sqrt(5 - s), math.sqrt(5 + s), -math.sqrt(5 + s)]
    weights = [8 / 15, *2 * [(7 + 2 * s) / 60], *2 * [(7 - 2 * s) / 60]]
    return [(mean + variance.sqrt() * e, number(w)) for e, w in zip(nodes, weights, strict=True)]


def each(nll: Callable[[Tensor, Tensor], Tensor], law: Callable[[Tensor], Any]):
    """C of independent outputs with the mean over all of them."""

    def curvature(z: Tensor, n: int) -> Tensor:
        blocks = [second_moment(nll, value, law(value)) for value in z.flatten()]
        return torch.block_diag(*blocks) / len(blocks)

    return curvature


def with_weights(curvature: Callable[[Tensor, int], Tensor], weights: Callable[[int], Tensor]):
    return lambda z, n: curvature(z, n) * weights(n).flatten()


def as_sum(curvature: Callable[[Tensor, int], Tensor]):
    return lambda z, n: curvature(z, n) * z.numel()


def bce(z: Tensor, y: Tensor) -> Tensor:
    return functional.binary_cross_entropy(z, y)


def probability_curvature(z: Tensor, n: int) -> Tensor:
    return each(bce, bernoulli_law)(z, n)


def poisson(**options: Any):
    def nll(z: Tensor, y: Tensor) -> Tensor:
        return functional.poisson_nll_loss(z, y, **options)

    def rate(z: Tensor) -> Tensor:
        return z.exp() if options.get("log_input", True) else z + options.get("eps", 1e-8)

    return each(nll, lambda z: poisson_law(rate(z)))


def nll_curvature(weights: Callable[[int], Tensor]):
    """E[g gᵀ] of −z_y for y ~ softmax(z) is diag(p), times a weight for each term."""

    def curvature(z: Tensor, n: int) -> Tensor:
        # (terms, C) in the order of z, which for images is (n, C, d).
        p = z.exp()
        w = weights(n).unsqueeze(1).expand_as(p)
        return torch.diag((w * p).flatten())

    return curvature


def pairs_curvature(eps: float = 1e-6, shared: bool = False, summed: bool = False):
    """E[g gᵀ] of all terms with z = (all means, all variances)."""

    def nll(z: Tensor, y: Tensor) -> Tensor:
        return functional.gaussian_nll_loss(z[0], y, z[1], eps=eps)

    def curvature(z: Tensor, n: int) -> Tensor:
        means = z[: n * 2]
        variances = z[n * 2 :]
        total = torch.zeros(len(z), len(z), dtype=z.dtype)
        for i in range(len(means)):
            j = n * 2 + (i // 2 if shared else i)
            pair = torch.stack((z[i], z[j]))
            law = normal_law(pair[0], pair[1].clamp(min=eps))
            block = second_moment(nll, pair, law)
            index = torch.tensor([i, j])
            total[index[:, None], index] += block
        assert len(variances) == n * (1 if shared else 2)
        return total if summed else total / (n * 2)

    return curvature


def irls(delta: float, factor: float, target: Callable[[int], Tensor], summed: bool = False):
    """c min(1, δ/|r|): the curvature of the parabola through both points with the same loss as r."""

    def curvature(z: Tensor, n: int) -> Tensor:
        r = (z.flatten() - target(n).flatten()).abs()
        w = torch.where(r > delta, delta / r, torch.ones_like(r)) * factor
        return torch.diag(w) / (1 if summed else z.numel())

    return curvature
