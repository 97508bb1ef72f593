"""The step of `control/geodesic_steps.py`: h + λ/2 (δ − μδ₀)ᵀD(δ − μδ₀) minimised with one J.

F = Σ_t s w_t F_R J_tᵀJ_t comes from J itself, which the statistics' backward pass has shown. Layout:
vectors in parameter space are (parameters,), unit after unit, as the columns of J.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kronfac.control import AdaptiveDamping, GeodesicSteps, Measurement, Step
from kronfac.control.geodesic_steps import SAME, Outcome
from kronfac.evaluation import Evaluation
from kronfac.groups import PerParameter
from kronfac.linearization import Explicit, can_be_explicit
from kronfac.linearization.finite_difference import second_derivative
from kronfac.network import Matrices, Network
from kronfac.network.side_effects import unseen_writes
from kronfac.objective.gaussian import Residual
from kronfac.proposal import Proposal, Proposer
from kronfac.settings import Settings
from kronfac.state import CurrentInverse

PIECES = 8
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

    @torch.no_grad()
    def outputs_at(self, delta: Matrices) -> list[Tensor]:
        """The residuals at θ + δ, (terms, 1) of every pass."""
        found = []
        for view in self.views:
            with unseen_writes(self.network.parameters), self.network.displaced(delta):
                (raw,) = view.part.run(self.network.model)
            (terms,) = view.part.terms
            found.append(terms.matrix(raw))
        return found

    @cached_property
    def loss(self) -> float:
        """½ rᵀWr."""
        pairs = zip(self.views, self.weights, strict=True)
        return sum(float((w * view.outputs[0].square()).sum()) for view, w in pairs) / 2

    def change(self, outputs: Sequence[Tensor]) -> float:
        """½ (rᵀWr there − rᵀWr here), without the cancellation."""
        total = 0.0
        for view, w, there in zip(self.views, self.weights, outputs, strict=True):
            (here,) = view.outputs
            total += float((w * (there - here) * (there + here)).sum())
        return total / 2

    def pull(self, outputs: Sequence[Tensor]) -> Tensor:
        """JᵀW (r there − r here): how the gradient changes, by the J of here."""
        parts = [
            _jacobian(view).mT @ (w * (there - view.outputs[0])).squeeze(-1)
            for view, w, there in zip(self.views, self.weights, outputs, strict=True)
        ]
        return torch.stack(parts).sum(dim=0)

    def matrices(self, v: Tensor) -> Matrices:
        """A vector as one matrix per unit."""
        shapes = [unit.shape for unit in self.network.units]
        parts = v.split([math.prod(shape) for shape in shapes])
        return tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))


@dataclass(frozen=True)
class Damped:
    """h(θ + δ) + ½ (δ − c)ᵀ diag(damping) (δ − c), and the decomposition of its matrix at δ = 0."""

    model: WholeModel
    evaluation: Evaluation
    gradient: Tensor
    """∇h, (parameters,)."""
    damping: Tensor
    """λD, (parameters,)."""
    centre: Tensor
    """c = μδ₀, (parameters,)."""
    solve: Callable[[Tensor], Tensor]
    """From g to −(F + λD + ηI)⁻¹g."""

    @cached_property
    def slope(self) -> Tensor:
        """The gradient at δ = 0."""
        return self.gradient - self.damping * self.centre

    def start(self, bend: float) -> tuple[Tensor, Tensor] | None:
        """v, and v + a/2 to begin with; None if the residuals bend too much along v."""
        v = self.solve(self.slope)
        a = self.solve(self.model.bend(v))
        if not float(a.norm()) <= bend * float(v.norm()):  # NaN included
            return None
        return v, v + a / 2

    def descend(self, rule: GeodesicSteps, delta: Tensor) -> tuple[Tensor, float, Outcome] | None:
        """δ after corrections and h(θ + δ) − h(θ); None if h has not fallen with any of them."""
        eta = self.evaluation.weight_decay.usual
        bound, last = (rule.far - 1) * self.model.loss, math.inf
        best: tuple[Tensor, float] | None = None
        outcome: Outcome = "slow"
        for _ in range(rule.corrections + 1):
            step = self.model.matrices(delta)
            outputs = self.model.outputs_at(step)
            change = self.model.change(outputs) + self.evaluation.decay_change(step)
            away = delta - self.centre
            raised = change + float(away @ (self.damping * away)) / 2
            if not raised < bound:  # NaN included
                outcome = "diverged"
                break
            bound = raised
            if change < (0.0 if best is None else best[1]):
                best = delta, change
            slope = self.gradient + self.model.pull(outputs) + eta * delta + self.damping * away
            correction = self.solve(slope)
            gain = -float(correction @ slope) / 2
            if gain < rule.settled * -change:
                outcome = "settled"
                break
            if gain > rule.shrink * last:
                break
            last = gain
            delta = delta + correction
        return None if best is None else (*best, outcome)


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
    curvature = F.diagonal()
    D = curvature / curvature.mean() + rule.floor
    D /= 1 + rule.floor
    # A smaller λ is lost in the rounding of F.
    lambda_ = max(m.lambda_, m.precision * float(curvature.mean()))
    centres = [torch.zeros_like(gradient)]
    if proposer.state.momentum is not None and rule.momentum > 0:
        last = torch.cat([V.reshape(-1) for V in proposer.state.momentum])
        centres.insert(0, rule.momentum * last)
    for trial in range(1, rule.trials + 1):
        with proposer.watch("direction"):
            solve = _solver(F, lambda_ * D + point.evaluation.weight_decay.usual)
        for centre in centres if solve is not None else ():
            assert solve is not None
            damped = Damped(model, point.evaluation, gradient, lambda_ * D, centre, solve)
            with proposer.watch("direction"):
                begin = damped.start(rule.bend)
            if begin is None:
                continue
            v, delta = begin
            with proposer.watch("reduction_ratio"):
                found = damped.descend(rule, delta)
            if found is not None:
                delta, change, outcome = found
                slope, held = float(damped.slope @ v), float(v @ (damped.damping * v))
                proposal = _proposal(proposer, current, model.matrices(delta), change, slope, held)
                return proposal, lambda_ * rule.after(outcome, trial)
        lambda_ *= rule.factor
    return None, lambda_


def lower_gram(A: Tensor) -> Tensor:
    """AᵀA on and below its diagonal, (columns, columns); zeros, or some of the rest, above.

    By a few rows at a time, which leaves out most of what is above: 9/16 of the multiplications.
    """
    size = A.shape[1]
    gram = A.new_zeros(size, size)
    width = -(-size // PIECES)
    for start in range(0, size, width):
        stop = start + width
        gram[start:stop, :stop] = A[:, start:stop].mT @ A[:, :stop]
    return gram


def _solver(F: Tensor, damping: Tensor) -> Callable[[Tensor], Tensor] | None:
    """g ↦ −(F + diag(damping))⁻¹g; None if there is no decomposition."""
    damped = F.clone()
    damped.diagonal().add_(damping)
    root, failed = torch.linalg.cholesky_ex(damped)
    if bool(failed):
        return None
    return lambda g: torch.cholesky_solve(g.neg().unsqueeze(1), root).squeeze(1)


def _proposal(
    proposer: Proposer,
    current: CurrentInverse,
    delta: Matrices,
    change: float,
    slope: float,
    damped: float,
) -> Proposal:
    """The step as others are proposed; M(v) − M(0) = ½ slope, and vᵀ(F + λD + ηI)v = −slope.

    `slope` is that of M along v, λD's part with δ₀ included, and `damped` is λ vᵀDv.
    """
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
