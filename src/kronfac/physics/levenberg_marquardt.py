"""Levenberg–Marquardt with geodesic acceleration and momentum, for small least-squares problems.

A step is near the minimiser of

    h(θ + δ) + λ/2 (δ − μδ₀)ᵀD(δ − μδ₀),   D ∝ diag F + c mean(diag F) I   with a mean of 1,

where F = JᵀWJ and J is the Jacobian of all residuals. D is Marquardt's scaling: a parameter that moves the
residuals much is damped more. δ₀ is the last step, as in SPRING (Goldshlager, Abrahamsen and Lin, 2024):
damping the change of the step lets steps grow along a valley. If residuals were linear in θ, the minimiser
would be

    v = −(F + λD + ηI)⁻¹ (∇h − λμDδ₀).

The residuals' second derivative r″ along v gives the second-order step

    δ = v + a/2,   a = −(F + λD + ηI)⁻¹ Jᵀ W r″          (Transtrum and Sethna, 2012)

for one more forward pass and a solution with the same decomposition. Corrections then lead to the
minimiser, each for a forward pass and a solution with the J and the decomposition of θ:

    δ ← δ − (F + λD + ηI)⁻¹ (JᵀW r(θ + δ) + η(θ + δ) + λD(δ − μδ₀)).

Passes are cheap beside the decomposition, and λ can be smaller by decades with corrections.

Every step is tried on its own points: first with momentum, then without, then with larger λ. So all steps
need the same points.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kronfac.errors import ClosureError, UnsupportedModelError
from kronfac.model import find_network
from kronfac.objective import Gaussian, objective_of
from kronfac.physics.residuals import Residuals, linearize_residuals
from kronfac.record import record

LIMIT = 2048
"""Parameters at most: a matrix of that size is decomposed in every trial. 1,185 take about 40 ms."""
FIRST = 1e-2
"""λ of the first step, as a share of the mean of F's diagonal."""
FACTOR = 3.0
"""By how much λ moves."""
FLOOR = 0.01
"""c, the share of the mean that every parameter's scale has in D."""
BEND = 1.0
"""The largest ‖a‖ / ‖v‖ of a step; beyond it the expansion along v says nothing."""
FAR = 1000.0
"""How many times h(θ) the damped objective may be before the first correction; after it, it has to fall."""
SETTLED = 0.1
"""Corrections end when the next one promises less than this share of the decrease of h."""
SHRINK = 0.5
"""Corrections end when one promises more than this share of what the last one did."""
AGREEMENT = 1e-6
"""Relative difference between JᵀWr and the closure's gradient above which part of the loss was not seen."""

Outcome = Literal["settled", "slow", "diverged"]
"""How corrections end: little is left to gain; there are too many, or they are slow; one was a step up."""


@dataclass(frozen=True)
class DenseReport:
    """What a step did."""

    loss: float
    """h(θ) before the step, weight decay included."""
    change: float
    """h(θ + δ) − h(θ); 0 if no step was taken."""
    lambda_: float
    """λ after the step."""
    trials: int
    """Values of λ that were tried."""


class DenseLevenbergMarquardt(torch.optim.Optimizer):
    """Exact, damped Gauss–Newton steps for residuals of a small perceptron in float64.

    Example:
        >>> x = torch.linspace(0, 1, 50, dtype=torch.float64).unsqueeze(1)
        >>> model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> optimizer = DenseLevenbergMarquardt(model)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = nn.functional.mse_loss(model(x), (6 * x).sin())
        ...     loss.backward()
        ...     return loss
        >>> for _ in range(50):
        ...     loss = optimizer.step(closure)

    Args:
        model: a perceptron, or a `WithDerivatives` of one; parameters that are not frozen are trained.
        weight_decay: η in h(θ) + η/2 ‖θ‖². The closure leaves it out.
        lambda_: λ of the first step; None for 1 % of the mean of F's diagonal.
        momentum: μ, the share of the last step that a step is damped towards; 0 for none.
        trials: values of λ that are tried in a step. If none lowers the objective, θ stays, and the next
            step goes on with the last λ.
        corrections: in a trial at most.
    """

    report: DenseReport | None = None
    """What the last step did; None before the first."""

    def __init__(
        self,
        model: nn.Module,
        *,
        weight_decay: float = 0.0,
        lambda_: float | None = None,
        momentum: float = 0.7,
        trials: int = 10,
        corrections: int = 6,
    ) -> None:
        _check_range(
            "weight_decay is at least 0 and finite", weight_decay, 0 <= weight_decay < math.inf
        )
        positive = lambda_ is None or 0 < lambda_ < math.inf
        _check_range("lambda_ is positive and finite, or None", lambda_, positive)
        _check_range("momentum is at least 0 and below 1", momentum, 0 <= momentum < 1)
        _check_range("trials is 1 or more", trials, trials >= 1)
        _check_range("corrections is 0 or more", corrections, corrections >= 0)
        self._network = find_network(model, objective_of(Gaussian()))
        parameters = self._network.parameters
        size = sum(p.numel() for p in parameters)
        if size > LIMIT:
            raise UnsupportedModelError(
                f"DenseLevenbergMarquardt decomposes a matrix over all parameters, of which there may be "
                f"{LIMIT:,}; got {size:,}. Use kronfac.KFAC, or a smaller network."
            )
        if any(p.dtype != torch.float64 for p in parameters):
            raise UnsupportedModelError(
                "DenseLevenbergMarquardt works in float64; got a parameter in "
                f"{next(p.dtype for p in parameters if p.dtype != torch.float64)}. Call model.double() and "
                "use float64 points."
            )
        defaults = {
            "weight_decay": weight_decay,
            "lambda_": lambda_,
            "momentum": momentum,
            "trials": trials,
            "corrections": corrections,
        }
        super().__init__(parameters, defaults)

    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        """Take one step, and return what the closure returned.

        Args:
            closure: zeroes gradients, computes the loss from `kronfac.least_squares` or `nn.MSELoss`,
                calls `backward()` on it and returns it.

        Raises:
            ClosureError: the closure's gradient is not that of the sums of squares that it called.
            UnsupportedModelError: the gradient of a residual by itself is not seen.
        """
        network, group = self._network, self.param_groups[0]
        with torch.enable_grad(), record(network.model, network.objective) as recording:
            returned = closure()
        with torch.no_grad():
            residuals = linearize_residuals(network, recording.batch())
            gradient = self._checked_gradient(residuals)
            theta = flatten(network.theta())
            eta = group["weight_decay"]
            problem = Problem(residuals, gradient + eta * theta, theta, eta)
            delta, change, trials = self._try(problem, group)
            network.move(residuals.matrices(delta))
            for p, part in zip(
                network.parameters, network.split(residuals.matrices(delta)), strict=True
            ):
                self.state[p]["momentum_buffer"] = part.clone()
        self.report = DenseReport(problem.loss, change, group["lambda_"], trials)
        return returned

    def _checked_gradient(self, residuals: Residuals) -> Tensor:
        """JᵀWr, which has to be the gradient that the closure left."""
        grads = [p.grad for p in self._network.parameters]
        if all(g is None for g in grads):
            raise ClosureError(
                "The closure left no gradient in any trained parameter; it has to call backward() on the "
                "loss."
            )
        own = residuals.gradient
        pairs = zip(self._network.parameters, grads, strict=True)
        left = flatten(
            self._network.join([torch.zeros_like(p) if g is None else g for p, g in pairs])
        )
        if not float((left - own).norm()) <= AGREEMENT * float(own.norm()):
            raise ClosureError(
                "The closure's gradient is not that of the sums of squares that it called. Zero gradients "
                "first, and write the whole objective with kronfac.least_squares or nn.MSELoss."
            )
        return own

    def _try(self, problem: "Problem", group: dict[str, Any]) -> tuple[Tensor, float, int]:
        """The first δ that lowers h, or zeros, with h(θ + δ) − h(θ) and the number of trials."""
        scales = problem.residuals.fisher.diagonal()
        mean = float(scales.mean())
        D = (scales / mean + FLOOR) / (1 + FLOOR)
        # A smaller λ is lost in the rounding of F.
        least = torch.finfo(D.dtype).eps * mean
        lambda_ = FIRST * mean if group["lambda_"] is None else max(group["lambda_"], least)
        centres = [torch.zeros_like(problem.gradient)]
        if group["momentum"] > 0 and self.state:
            last = [self.state[p]["momentum_buffer"] for p in self._network.parameters]
            centres.insert(0, group["momentum"] * flatten(self._network.join(last)))
        for trial in range(1, group["trials"] + 1):
            for centre in centres:
                found = problem.minimise(lambda_ * D, centre, group["corrections"])
                if found is not None:
                    delta, change, outcome = found
                    if outcome == "diverged":
                        lambda_ *= FACTOR
                    elif outcome == "settled" and trial == 1:
                        lambda_ /= FACTOR
                    group["lambda_"] = lambda_
                    return delta, change, trial
            lambda_ *= FACTOR
        group["lambda_"] = lambda_
        return torch.zeros_like(problem.gradient), 0.0, group["trials"]


@dataclass(frozen=True)
class Problem:
    """h around θ."""

    residuals: Residuals
    gradient: Tensor
    """∇h, (parameters,)."""
    theta: Tensor
    eta: float

    @cached_property
    def loss(self) -> float:
        """h(θ)."""
        return self.residuals.loss + self.eta / 2 * float(self.theta @ self.theta)

    def minimise(
        self, damping: Tensor, centre: Tensor, corrections: int
    ) -> tuple[Tensor, float, Outcome] | None:
        """Minimise h(θ + δ) + ½ (δ − c)ᵀ diag(damping) (δ − c) over δ.

        Args:
            damping: λD, (parameters,).
            centre: c = μδ₀, (parameters,).
            corrections: at most.

        Returns:
            δ, h(θ + δ) − h(θ), and how corrections ended; None if h has not fallen with any δ.
        """
        r, eta = self.residuals, self.eta
        solve = _solver(r.fisher, damping + eta)
        if solve is None:
            return None
        v = solve(self.gradient - damping * centre)
        a = solve(r.pull(r.second_derivative(v)))
        if not float(a.norm()) <= BEND * float(v.norm()):  # NaN included
            return None
        delta = v + a / 2
        bound, last = (FAR - 1) * r.loss, math.inf
        best: tuple[Tensor, float] | None = None
        outcome: Outcome = "slow"
        for _ in range(corrections + 1):
            there = r.at(delta)
            change = r.change(there) + eta * float((self.theta + delta / 2) @ delta)
            away = delta - centre
            raised = change + float(away @ (damping * away)) / 2
            if not raised < bound:  # NaN included
                outcome = "diverged"
                break
            bound = raised
            if change < (0.0 if best is None else best[1]):
                best = delta, change
            slope = self.gradient + r.pull(there - r.values) + eta * delta + damping * away
            correction = solve(slope)
            gain = -float(correction @ slope) / 2
            if gain < SETTLED * -change:
                outcome = "settled"
                break
            if gain > SHRINK * last:
                break
            last = gain
            delta = delta + correction
        return None if best is None else (*best, outcome)


def flatten(matrices: tuple[Tensor, ...]) -> Tensor:
    """A vector in parameter space as one tensor, (parameters,)."""
    return torch.cat([V.reshape(-1) for V in matrices])


def _solver(F: Tensor, damping: Tensor) -> Callable[[Tensor], Tensor] | None:
    """g ↦ −(F + diag(damping))⁻¹g; None if there is no decomposition."""
    damped = F.clone()
    damped.diagonal().add_(damping)
    root, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed):
        return None
    return lambda g: torch.cholesky_solve(g.neg().unsqueeze(1), root).squeeze(1)


def _check_range(rule: str, value: object, holds: bool) -> None:
    if not holds:
        raise ValueError(f"DenseLevenbergMarquardt's {rule}; got {value}.")
