"""Differential equations with known solutions: points, residuals, relative L² error. All in float64.

Points are drawn once, from a seed that all runs share, and stay. The loss is a sum of mean squares: the
residual inside, and the differences at the boundary and at the start, times `WEIGHT`.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn

from kronfac import least_squares
from kronfac.physics import Jet, Sin, WithDerivatives
from kronfac_experiments.race.problem import Batch, Problem, Split, squared_error
from kronfac_experiments.task import Cases

WEIGHT = 100.0
"""Weight of boundary and initial values."""
TESTED = 4000
"""Points that the error is measured on, which are not those of the loss."""
POINTS_SEED = 1234
BURGERS_VISCOSITY = 0.1 / math.pi
QUADRATURE = 100
"""Nodes of the Gauss–Hermite quadrature in the Cole–Hopf transform."""


@dataclass(frozen=True)
class Equation:
    """An equation on the unit cube, or on the box that `scale` makes of it.

    Args:
        name: For the command line.
        about: The equation, in a line.
        inputs: Dimension of the points; with time, time is the first.
        second: The second derivatives that the residual needs, see `WithDerivatives`.
        residual: From jet and points to the residual, (points, 1).
        exact: The solution, (points, 1).
        timed: Whether the first input is time, which has a start and no end.
        hidden: Widths of the hidden layers.
        inside: Points of the residual.
        boundary: Points of boundary and start.
        box: Smallest and largest value of the last input.
        activation: Between the layers.
    """

    name: str
    about: str
    inputs: int
    second: str | Sequence[tuple[int, int]]
    residual: Callable[[Jet, Tensor], Tensor]
    exact: Callable[[Tensor], Tensor]
    timed: bool = False
    hidden: tuple[int, ...] = (32, 32)
    inside: int = 900
    boundary: int = 120
    box: tuple[float, float] = (0.0, 1.0)
    activation: type[nn.Module] = Sin

    @cached_property
    def points(self) -> tuple[Tensor, Tensor, Tensor]:
        """Points inside, points of boundary and start, points to test on."""
        generator = torch.Generator().manual_seed(POINTS_SEED)
        counts = (self.inside, self.boundary, TESTED)
        inside, boundary, tested = (
            torch.rand(n, self.inputs, generator=generator, dtype=torch.float64) for n in counts
        )
        faces = [(i, end) for i in range(self.inputs) for end in (0.0, 1.0)]
        if self.timed:
            faces.remove((0, 1.0))
        for k, (i, end) in enumerate(faces):
            boundary[k :: len(faces), i] = end
        low, high = self.box
        for x in (inside, boundary, tested):
            x[:, -1] = low + (high - low) * x[:, -1]
        return inside, boundary, tested

    @cached_property
    def values(self) -> tuple[Tensor, Tensor]:
        """The solution at the boundary and at the points to test on."""
        _, boundary, tested = self.points
        return self.exact(boundary), self.exact(tested)

    def build(self) -> WithDerivatives:
        """A perceptron with PyTorch's own initial parameters."""
        modules: list[nn.Module] = []
        width = self.inputs
        for hidden in self.hidden:
            modules += [nn.Linear(width, hidden, dtype=torch.float64), self.activation()]
            width = hidden
        modules.append(nn.Linear(width, 1, dtype=torch.float64))
        return WithDerivatives(nn.Sequential(*modules), self.second)

    def loss(self, u: WithDerivatives) -> Tensor:
        """What is minimised."""
        inside, boundary, _ = self.points
        difference = u.perceptron(boundary) - self.values[0]
        residual = self.residual(u(inside), inside)
        return least_squares(residual) + least_squares(difference, WEIGHT)

    @torch.no_grad()
    def error(self, u: WithDerivatives) -> float:
        """‖u − u*‖ / ‖u*‖ over the points to test on."""
        expected = self.values[1]
        return float((u.perceptron(self.points[2]) - expected).norm() / expected.norm())

    @property
    def description(self) -> str:
        """In a line."""
        widths = "-".join(map(str, (self.inputs, *self.hidden, 1)))
        activation = {Sin: "sine", nn.Tanh: "tanh"}[self.activation]
        return f"{self.about}; {widths}, {activation}, {self.inside} + {self.boundary} points"


# ------------------------------------------------------------------------------------------- solutions


def _sines(x: Tensor) -> Tensor:
    """Π sin πxᵢ, with Δu = −d π² u."""
    return (math.pi * x).sin().prod(dim=1, keepdim=True)


def _poisson2(u: Jet, x: Tensor) -> Tensor:
    return u.second[:, 0] + 2 * math.pi**2 * _sines(x)


def _cosines(x: Tensor) -> Tensor:
    """Σ cos πxᵢ, with Δu = −π² u: in five dimensions a product would be next to 0 nearly everywhere."""
    return (math.pi * x).cos().sum(dim=1, keepdim=True)


def _poisson5(u: Jet, x: Tensor) -> Tensor:
    return u.second[:, 0] + math.pi**2 * _cosines(x)


HEAT = 0.25


def _heat(u: Jet, x: Tensor) -> Tensor:
    return u.first[:, 0] - HEAT * u.second[:, 0]


def _cooling(x: Tensor) -> Tensor:
    """exp(−π² κ t) sin πx."""
    return torch.exp(-HEAT * math.pi**2 * x[:, :1]) * (math.pi * x[:, 1:]).sin()


def _burgers(u: Jet, x: Tensor) -> Tensor:
    return u.first[:, 0] + u.value * u.first[:, 1] - BURGERS_VISCOSITY * u.second[:, 0]


# Not at first use, which may be inside a transform of torch.func.
_NODES, _WEIGHTS = map(torch.from_numpy, np.polynomial.hermite.hermgauss(QUADRATURE))


def cole_hopf(x: Tensor) -> Tensor:
    """Burgers from u(0, x) = −sin πx, by quadrature over the heat kernel.

    u = −∫ sin π(x − y) f(x − y) K dy / ∫ f(x − y) K dy, f(y) = exp(−cos πy / 2πν), K = exp(−y² / 4νt).
    """
    t, place = x[:, :1], x[:, 1:]
    y = math.pi * (place - 2 * (BURGERS_VISCOSITY * t).sqrt() * _NODES)
    # The largest exponent is taken out: only the ratio counts.
    exponent = -y.cos() / (2 * math.pi * BURGERS_VISCOSITY)
    density = _WEIGHTS * torch.exp(exponent - exponent.amax(dim=1, keepdim=True))
    above, below = (density * y.sin()).sum(1, keepdim=True), density.sum(1, keepdim=True)
    return -above / below


def _wave(x: Tensor) -> Tensor:
    """eˣ sin πx sin 2πy, 0 on the boundary."""
    return x[:, :1].exp() * (math.pi * x[:, :1]).sin() * (2 * math.pi * x[:, 1:]).sin()


def _reaction(u: Jet, x: Tensor) -> Tensor:
    """−Δu + u³ + u_x − f, with f from the solution."""
    along, across = math.pi * x[:, :1], (2 * math.pi * x[:, 1:]).sin() * x[:, :1].exp()
    v = along.sin() * across
    v_x = (math.pi * along.cos() + along.sin()) * across
    v_xx = ((1 - math.pi**2) * along.sin() + 2 * math.pi * along.cos()) * across
    f = -(v_xx - 4 * math.pi**2 * v) + v**3 + v_x
    return -u.second[:, 0] + u.value**3 + u.first[:, 0] - f


EQUATIONS = (
    Equation("poisson-2", "Δu = f in 2 dimensions, u = Π sin πxᵢ", 2, "laplacian", _poisson2, _sines),
    Equation(
        "poisson-5", "Δu = f in 5 dimensions, u = Σ cos πxᵢ", 5, "laplacian", _poisson5, _cosines,
        inside=1500, boundary=500,
    ),
    Equation(
        "heat", "u_t = ¼ u_xx, u = exp(−π²t/4) sin πx", 2, [(1, 1)], _heat, _cooling, timed=True
    ),
    Equation(
        "burgers", "u_t + u u_x = (0.1/π) u_xx from −sin πx, solution by Cole and Hopf", 2, [(1, 1)],
        _burgers, cole_hopf, timed=True, inside=1500, boundary=180, box=(-1.0, 1.0),
    ),
    Equation(
        "reaction", "−Δu + u³ + u_x = f in 2 dimensions, u = eˣ sin πx sin 2πy", 2, "laplacian",
        _reaction, _wave, activation=nn.Tanh,
    ),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class EquationProblem(Problem):
    """An equation as a problem of the race: every step is over all points, and the metric is the error."""

    equation: Equation = EQUATIONS[0]

    @property
    def examples(self) -> int:
        """Points of the residual and of the boundary."""
        return self.equation.inside + self.equation.boundary

    def objective(self, model: nn.Module, loss: nn.Module, batch: Batch) -> Tensor:
        """The equation's own loss; residuals need no loss module."""
        assert isinstance(model, WithDerivatives)
        return self.equation.loss(model)

    def shuffled(self, size: int | None, seed: int) -> Iterator[Batch]:
        """The same points for ever."""
        while True:
            yield ()

    def training_loss(self, model: nn.Module) -> float:
        """The loss over all points."""
        assert isinstance(model, WithDerivatives)
        return float(self.equation.loss(model).detach())

    def validation(self, model: nn.Module) -> tuple[float, float]:
        """The relative L² error on points that are not trained on, twice."""
        assert isinstance(model, WithDerivatives)
        error = self.equation.error(model)
        return error, error


def _points(equation: Equation) -> Split:
    inside, _, tested = equation.points
    return Split(Cases(inside, inside), Cases(tested, tested))


PHYSICS = tuple(
    EquationProblem(
        equation.name,
        equation.description,
        partial(_points, equation),
        equation.build,
        nn.MSELoss,
        squared_error,
        "relative L² error",
        batches=(None,),
        equation=equation,
    )
    for equation in EQUATIONS
)
