"""Poisson's equation with PINA: Δu = f on the unit square, u = 0 on its boundary.

    python examples/pina_poisson.py

With f = −2π² sin πx sin πy the solution is sin πx sin πy.
"""

import torch
from pina import Condition, LabelTensor, Trainer
from pina.domain import CartesianDomain
from pina.equation import Equation
from pina.equation.zoo import FixedValue
from pina.problem import SpatialProblem
from pina.solver import PhysicsInformedSingleModelSolver
from pina.weighting import ScalarWeighting
from torch import nn

from kronfac.integrations.pina import kfac, network, variables


def solution(x: LabelTensor) -> LabelTensor:
    """sin πx sin πy, (points, 1)."""
    return torch.sin(torch.pi * x["x"]) * torch.sin(torch.pi * x["y"])


def poisson(x: LabelTensor, u: LabelTensor) -> LabelTensor:
    """Δu − f."""
    return u["ddu"] + 2 * torch.pi**2 * solution(x)


class Poisson(SpatialProblem):
    """The problem, with the network's derivatives among its outputs."""

    output_variables = variables(["u"], ["x", "y"])
    spatial_domain = CartesianDomain({"x": [0, 1], "y": [0, 1]})
    domains = {"inside": spatial_domain, "boundary": spatial_domain.partial()}  # noqa: RUF012
    conditions = {  # noqa: RUF012
        "inside": Condition(domain="inside", equation=Equation(poisson)),
        "boundary": Condition(domain="boundary", equation=FixedValue(0.0, components=["u"])),
    }


def main(steps: int = 400, points: int = 400, width: int = 32) -> float:
    """The relative L² error of the network after so many steps."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # errors below 1e-4 need it
    problem = Poisson()
    problem.discretise_domain(points, "random", domains=["inside"])
    problem.discretise_domain(points // 4, "random", domains=["boundary"])
    perceptron = nn.Sequential(
        nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )
    net = network(perceptron, ["x", "y"])
    solver = PhysicsInformedSingleModelSolver(
        problem,
        net,
        optimizer=kfac(problem, net),
        weighting=ScalarWeighting({"boundary": 100.0}),
    )
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(solver, max_epochs=steps, accelerator="cpu", **quiet).train()

    test = LabelTensor(torch.rand(4000, 2), ["x", "y"])
    with torch.no_grad():
        difference, exact = solver(test)["u"] - solution(test), solution(test)
    error = float(difference.norm() / exact.norm())
    print(f"loss {solver.optimizer.instance.report.loss:.1e}, relative L² error {error:.1e}")
    return error


if __name__ == "__main__":
    main()
