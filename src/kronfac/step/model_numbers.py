"""The numbers of the quadratic model M along a few directions, in one synchronisation with the device."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kronfac.control import Coefficients, Matrix
from kronfac.curvature import Curvature
from kronfac.groups import PerParameter
from kronfac.model import Matrices, Network
from kronfac.step.evaluation import Point


@dataclass(frozen=True)
class Along:
    """M along one step."""

    slope: float
    """∇hᵀδ."""
    curvature: float
    """δᵀ(F + λI + H)δ."""
    curvature_share: float
    """See `Proposal`."""

    @property
    def change(self) -> float:
        """M(δ) − M(0)."""
        return self.slope + self.curvature / 2


@dataclass(frozen=True)
class ModelNumbers:
    """Numbers that the host needs to make a step of a proposal, in float64."""

    fisher: Matrix
    """v_iᵀFv_j."""
    inner: Matrix
    """v_iᵀv_j."""
    decay: float | Matrix
    """η, or v_iᵀHv_j with the diagonal matrix H of η if parameters differ in it."""
    slopes: Coefficients
    """∇hᵀv_j."""
    returned: float
    loss: float
    squares: float
    """‖θ‖², if the objective has it or the step is not bounded."""
    penalty: float
    """½ Σ_p η_p ‖p‖²."""

    def damped(self, lambda_: float) -> Matrix:
        """v_iᵀ(F + λI + H)v_j."""
        if isinstance(self.decay, float):
            return _sum(self.fisher, self.inner, lambda_ + self.decay)
        return _sum(_sum(self.fisher, self.inner, lambda_), self.decay, 1.0)


def model_numbers(
    point: Point,
    curvature: Curvature,
    directions: Sequence[Matrices],
    gram: Tensor,
    bounded: bool,
) -> ModelNumbers | None:
    """Numbers from the step's one synchronisation; None if some are not finite, the factors included."""
    evaluation = point.evaluation
    count = len(directions)
    products = _inner_products(directions, point.gradient)
    eta, network = evaluation.weight_decay, evaluation.network
    squares = [] if bounded and not eta else _squares(network)
    apart = [] if eta.uniform else _decay_products(network, directions, eta)
    probes = [number for block in curvature.blocks for number in block.probe()]
    losses = [evaluation.returned_loss, evaluation.loss]
    # What is to be added up is added up by the host: on a device every sum is a launch.
    scalars = torch.stack([*products, *squares, *probes, *apart, *losses]).double()
    numbers = torch.cat([gram.reshape(-1), scalars]).tolist()
    if not all(map(math.isfinite, numbers)):
        return None
    fisher, rest = numbers[: count**2], numbers[count**2 :]
    pairs = len(products) // len(point.gradient)
    total = [sum(rest[i : len(products) : pairs]) for i in range(pairs)]
    lower = [total[i * (i + 1) // 2 :][: i + 1] for i in range(count)]
    returned, loss = rest[-2:]
    norms = rest[len(products) :][: len(squares)]
    decay: float | Matrix = eta.usual
    penalty = eta.usual / 2 * sum(norms)
    if not eta.uniform:
        sums = rest[len(rest) - 2 - len(apart) : -2]
        decay = [sums[i * count :][:count] for i in range(count)]
        penalty = sum(eta[p] / 2 * n for p, n in zip(network.parameters, norms, strict=True))
    return ModelNumbers(
        fisher=[fisher[i * count :][:count] for i in range(count)],
        inner=[[lower[max(i, j)][min(i, j)] for j in range(count)] for i in range(count)],
        decay=decay,
        slopes=total[-count:],
        returned=returned,
        loss=loss,
        squares=sum(norms),
        penalty=penalty,
    )


def _inner_products(directions: Sequence[Matrices], gradient: Matrices) -> list[Tensor]:
    """v_iᵀv_j for j ≤ i, then ∇hᵀv_j, of one layer after the other.

    All products of a layer in turn: they are bound by memory, and a layer's matrices stay in the cache.
    """
    products = []
    for matrices in zip(*directions, gradient, strict=True):
        *v, g = (M.reshape(-1) for M in matrices)
        products += [torch.dot(v[i], v[j]) for i in range(len(v)) for j in range(i + 1)]
        products += [torch.dot(g, v_j) for v_j in v]
    return products


def _decay_products(
    network: Network, directions: Sequence[Matrices], eta: PerParameter
) -> list[Tensor]:
    """v_iᵀHv_j, row by row; each part by its parameter."""
    parts = [[t.reshape(-1) for t in network.split(v)] for v in directions]
    etas = [eta[p] for p in network.parameters]

    def product(u: Sequence[Tensor], v: Sequence[Tensor]) -> Tensor:
        terms = [torch.dot(a, b) * e for a, b, e in zip(u, v, etas, strict=True) if e]
        return torch.stack(terms).sum()

    return [product(u, v) for u in parts for v in parts]


def _sum(A: Matrix, B: Matrix, weight: float) -> Matrix:
    """A + weight · B."""
    return [[a + weight * b for a, b in zip(*rows, strict=True)] for rows in zip(A, B, strict=True)]


def _squares(network: Network) -> list[Tensor]:
    """Terms of ‖θ‖²."""
    flat = [p.reshape(-1) for p in network.parameters]
    return [torch.dot(p, p) for p in flat]
