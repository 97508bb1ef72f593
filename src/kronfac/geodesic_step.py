"""The step of `control/geodesic_steps.py`: M minimised over all directions, and bent as the residuals are.

F = Σ_t s w_t F_R J_tᵀJ_t comes from J itself, which the statistics' backward pass has shown. Layout:
vectors in parameter space are (parameters,), unit after unit, as the columns of J.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kronfac.control import AdaptiveDamping, GeodesicSteps, Measurement, Step
from kronfac.control.geodesic_steps import SAME
from kronfac.evaluation import Evaluation
from kronfac.groups import PerParameter
from kronfac.linearization import Explicit, can_be_explicit
from kronfac.linearization.finite_difference import second_derivative
from kronfac.network import Matrices, Network
from kronfac.objective.gaussian import Residual
from kronfac.proposal import Proposal, Proposer
from kronfac.settings import Settings
from kronfac.state import CurrentInverse

PIECES = 4
"""Parts of the columns of J that `lower_gram` takes one after the other."""


def minimises_wholly(
    settings: Settings, evaluation: Evaluation, m: Measurement, rates: PerParameter
) -> bool:
    """Whether this step may be one: few parameters in float64, residuals, the same mini-batch every time.

    And nothing has been asked for that goes by another step: fractions, a trust region, learning rates.
    """
    rule, network = settings.step_size.geodesic_steps, evaluation.network
    if rule is None or m.noise is None or m.confirmed is not None or not evaluation.spread.alone:
        return False
    unit = m.examples if m.summed else 1
    return (
        network.dtype == torch.float64
        and sum(p.numel() for p in network.parameters) <= rule.limit
        and isinstance(settings.damping, AdaptiveDamping)
        and settings.clip is None
        and settings.statistics_fraction is None
        and settings.fisher_fraction is None
        and rates.uniform
        and rates.usual == 1
        and evaluation.weight_decay.uniform
        and all(
            isinstance(terms.likelihood, Residual)
            for part in evaluation.batch.passes
            for terms in part.terms
        )
        and m.noise * unit <= SAME * float(evaluation.loss)
        and can_be_explicit(network, evaluation.batch)
        and evaluation.loss_seen()
    )


@dataclass(frozen=True)
class WholeModel:
    """F and J on all examples, as matrices."""

    network: Network
    views: list[Explicit]
    """One for each pass, with its J."""
    weights: list[Tensor]
    """s w_t F_R of every term, (terms, 1)."""

    @classmethod
    def of(cls, proposer: Proposer) -> "WholeModel | None":
        """The model; None if the statistics have not shown J."""
        views, weights = [], []
        for part in proposer.examples.passes:
            view = None if proposer.around is None else proposer.around(part)
            if not isinstance(view, Explicit) or view.jacobian is None:
                return None
            (terms,), (z,) = part.terms, view.outputs
            views.append(view)
            weights.append(terms.weigh(terms.likelihood.fisher_product(z, torch.ones_like(z))))
        return cls(proposer.network, views, weights)

    @cached_property
    def fisher(self) -> Tensor:
        """F, (parameters, parameters), on and below its diagonal."""
        roots = [_jacobian(v) * w.sqrt() for v, w in zip(self.views, self.weights, strict=True)]
        return lower_gram(torch.cat(roots))

    def bend(self, v: Tensor) -> Tensor:
        """Jᵀ W r″ with r″ the second derivative of the residuals along v."""
        total = torch.zeros_like(v)
        direction = self.matrices(v)
        for view, weight in zip(self.views, self.weights, strict=True):
            J = _jacobian(view)
            (z,) = view.outputs
            Jv = (J @ v).unsqueeze(-1)
            (second,) = second_derivative(self.network, view.part, direction, [z], [Jv])
            total += J.mT @ (weight * second).squeeze(-1)
        return total

    def matrices(self, v: Tensor) -> Matrices:
        """A vector as one matrix per unit."""
        shapes = [unit.shape for unit in self.network.units]
        parts = v.split([math.prod(shape) for shape in shapes])
        return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


def propose_wholly(
    proposer: Proposer, rule: GeodesicSteps, current: CurrentInverse
) -> tuple[Proposal | None, float]:
    """The first of a few steps after which the objective is lower, and λ from there on.

    None if there is none, with the λ of the last trial; and if J was not shown, with the λ that it was.
    """
    m, point = proposer.measurement, proposer.point
    with proposer.watch("fisher_products"):
        model = WholeModel.of(proposer)
        if model is None:
            return None, m.lambda_
        F = model.fisher
    gradient = torch.cat([V.reshape(-1) for V in point.gradient])
    eta = point.evaluation.weight_decay.usual
    curvature = F.diagonal()
    D = curvature / curvature.mean() + rule.floor
    D /= 1 + rule.floor
    # A smaller λ is lost in the rounding of F.
    lambda_ = max(m.lambda_, m.precision * float(curvature.mean()))
    for trial in range(1, rule.trials + 1):
        with proposer.watch("direction"):
            found = _solve(model, F, gradient, lambda_ * D + eta, rule.bend)
        if found is not None:
            v, delta = found
            with proposer.watch("reduction_ratio"):
                change = point.evaluation.change(delta, loss_seen=True)
            if change < 0:
                slope, damped = float(gradient @ v), lambda_ * float(v @ (D * v))
                proposal = _proposal(proposer, current, delta, change, slope, damped)
                rho = change / (slope / 2 - damped / 2)
                return proposal, lambda_ * rule.after(rho, trial)
        lambda_ *= rule.factor
    return None, lambda_


def lower_gram(A: Tensor) -> Tensor:
    """AᵀA on and below its diagonal, (columns, columns); zeros, or some of the rest, above.

    By a few columns at a time, which leaves out most of what is above: 10/16 of the multiplications.
    """
    size = A.shape[1]
    gram = A.new_zeros(size, size)
    width = -(-size // PIECES)
    for start in range(0, size, width):
        stop = start + width
        gram[start:, start:stop] = A[:, start:].mT @ A[:, start:stop]
    return gram


def _solve(
    model: WholeModel, F: Tensor, gradient: Tensor, damping: Tensor, bend: float
) -> tuple[Tensor, Matrices] | None:
    """v, and δ = v + a/2; None if F with damping has no decomposition or the residuals bend too much."""
    damped = F.clone()
    damped.diagonal().add_(damping)
    root, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed):
        return None
    v = torch.cholesky_solve(gradient.neg().unsqueeze(1), root).squeeze(1)
    a = torch.cholesky_solve(model.bend(v).neg().unsqueeze(1), root).squeeze(1)
    if not float(a.norm()) <= bend * float(v.norm()):  # NaN included
        return None
    return v, model.matrices(v + a / 2)


def _proposal(
    proposer: Proposer,
    current: CurrentInverse,
    delta: Matrices,
    change: float,
    slope: float,
    damped: float,
) -> Proposal:
    """The step as others are proposed; M(v) − M(0) = ½ ∇hᵀv, and vᵀ(F + λD + ηI)v = −∇hᵀv."""
    evaluation = proposer.point.evaluation
    eta = evaluation.weight_decay.usual
    squares = sum(float(p.square().sum()) for p in proposer.network.parameters) if eta else 0.0
    return Proposal(
        gamma=proposer.measurement.gamma,
        inverse=current.inverse,
        decayed=current.decayed,
        step=Step((1.0,), slope / 2),
        delta=delta,
        slope=slope,
        momentum=delta,
        loss=float(evaluation.returned_loss),
        penalty=eta / 2 * squares,
        loss_seen=True,
        curvature_share=1 - damped / -slope if slope < 0 else 1.0,
        far=False,
        change=change,
        tried=True,
    )


def _jacobian(view: Explicit) -> Tensor:
    assert view.jacobian is not None
    return view.jacobian
