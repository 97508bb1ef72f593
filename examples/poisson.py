"""Poisson's equation by a physics-informed network: Δu = f on the unit square, u = 0 on its boundary.

    python examples/poisson.py

With f = −2π² sin πx sin πy the solution is sin πx sin πy.
"""

import math

import torch
from torch import Tensor, nn

import kronfac
from kronfac.physics import DenseLevenbergMarquardt, Sin, WithDerivatives


def solution(x: Tensor) -> Tensor:
    """sin πx sin πy, (points, 1)."""
    return (math.pi * x).sin().prod(dim=1, keepdim=True)


def main(steps: int = 100, points: int = 900, width: int = 32) -> float:
    """The relative L² error of the network after so many steps."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # errors below 1e-4 need it
    perceptron = nn.Sequential(
        nn.Linear(2, width), Sin(), nn.Linear(width, width), Sin(), nn.Linear(width, 1)
    )
    u = WithDerivatives(perceptron, "laplacian")
    inside, boundary = torch.rand(points, 2), torch.rand(120, 2)
    boundary[torch.arange(120), torch.arange(120) % 2] = (torch.arange(120) // 2 % 2).double()
    f = -2 * math.pi**2 * solution(inside)

    optimizer = DenseLevenbergMarquardt(u)

    def closure() -> Tensor:
        optimizer.zero_grad()
        residual = u(inside).second[:, 0] - f
        loss = kronfac.least_squares(residual) + kronfac.least_squares(perceptron(boundary), 100.0)
        loss.backward()
        return loss

    test = torch.rand(4000, 2)
    error = math.inf
    for step in range(1, steps + 1):
        loss = optimizer.step(closure)
        if step % 50 == 0 or step == steps:
            with torch.no_grad():
                error = float((perceptron(test) - solution(test)).norm() / solution(test).norm())
            print(f"step {step}: loss {loss.item():.1e}, relative L² error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
