"""One update, computed from a point and the state before it, in the order of [MG15 §9].

Nothing here changes anything: what a step finds comes back as a `Transition`, for the optimizer to
commit or to drop.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from kronfac.closure import Rows
from kronfac.errors import NonFiniteError, NotPositiveDefiniteError
from kronfac.factors import KroneckerFactors, ema_decay
from kronfac.inverses import ApproximateInverse, DampedInverse
from kronfac.inverses.block_diagonal import DampedBlockDiagonal
from kronfac.layers import Layer, Matrices
from kronfac.likelihoods import Objective
from kronfac.minibatch import Batch
from kronfac.report import Event, StepReport, Stopwatch
from kronfac.state import State
from kronfac.statistics import Fisher, estimate
from kronfac.step_size import DampingRule, GammaRule, Step, StepRule, fisher_gram

# The statistics change fastest in the first iterations, so the inverse is fresh in each [MG15 §9].
FIRST_REFRESHES = 3
# Relative difference, in ε of the parameters' dtype, between the loss that a closure returned and the
# loss of the rows it used above which the closure computes something that K-FAC cannot see. Both are
# of the same pass: only the summation over micro-batches differs.
LOSS_TOLERANCE = 64


class RefusedError(Exception):
    """This step must not be taken."""


@dataclass(frozen=True)
class Settings:
    """The choices that a user makes, see `KFAC`."""

    inverse: ApproximateInverse
    fisher: Fisher
    damping: DampingRule
    gamma: GammaRule
    step_size: StepRule
    statistics_fraction: float
    fisher_fraction: float
    inverse_interval: int

    def __post_init__(self) -> None:
        for name in ("statistics_fraction", "fisher_fraction"):
            fraction = getattr(self, name)
            if not 0 < fraction <= 1:
                raise ValueError(f"{name} lies in (0, 1]; got {fraction}.")
        if self.inverse_interval < 1:
            raise ValueError(f"inverse_interval is 1 or more; got {self.inverse_interval}.")
        self.gamma.check_interval(self.inverse_interval)


@dataclass(frozen=True)
class Point:
    """What the closure found at θ."""

    loss: Tensor
    """As the closure returned it."""
    gradient: Matrices
    """Of h, weight decay included."""
    weight_decay: float
    batch: Batch
    reevaluate: Callable[[Matrices], Tensor]
    """The loss at θ + δ by calling the closure there, for losses that K-FAC cannot see."""
    rows: tuple[Rows, ...] | None = None
    """The gradient in factors, for the low-rank route."""


@dataclass(frozen=True)
class Transition:
    """A step, computed and not yet taken."""

    delta: Matrices
    state: State
    report: StepReport


@dataclass(frozen=True)
class _Proposal:
    """One candidate γ, carried through to the step that it leads to."""

    gamma: float
    inverse: DampedInverse
    decayed: Matrices | None
    step: Step
    delta: Matrices
    loss: float
    loss_seen: bool
    change: float | None = None  # h(θ + δ) − h(θ), where it was judged by that


@dataclass(frozen=True)
class Update:
    """The computation of a step for one network."""

    model: nn.Module
    layers: Sequence[Layer]
    objective: Objective
    settings: Settings

    def __call__(self, point: Point, before: State, watch: Stopwatch) -> Transition:
        """The step from `point` and the state after it.

        Raises:
            RefusedError: loss, gradient, statistics or step are not finite.
        """
        settings = self.settings
        k = before.iteration + 1
        events: list[Event] = []
        with watch("statistics"):
            factors, generator = self._updated_factors(point, before, k)
        best = self._best_proposal(point, before, factors, watch, events)
        if not best.loss_seen:
            events.append(
                Event(
                    "loss_not_seen",
                    "The closure's loss is not the loss module's value on the model's outputs; the "
                    "curvature is that of the loss module, and ρ calls the closure again.",
                )
            )
        lambda_, rho = before.lambda_, None
        if settings.damping.measures(k) and best.step.predicted_change != 0:
            with watch("reduction_ratio"):
                change = best.change
                if change is None:
                    change = self._objective_change(point, best)
            rho = change / best.step.predicted_change
            lambda_ = settings.damping.updated(lambda_, rho)
        alpha, *mu = best.step.coefficients
        return Transition(
            delta=best.delta,
            state=State(
                iteration=k,
                lambda_=lambda_,
                gamma=best.gamma,
                generator=generator,
                factors=factors,
                inverse=best.inverse,
                previous_delta=best.delta if settings.step_size.momentum else None,
                decayed=best.decayed,
            ),
            report=StepReport(
                iteration=k,
                loss=best.loss,
                lambda_=lambda_,
                gamma=best.gamma,
                alpha=alpha,
                mu=mu[0] if mu else None,
                rho=rho,
                predicted_change=best.step.predicted_change,
                cases=point.batch.cases,
                seconds=watch.seconds,
                events=tuple(events),
            ),
        )

    def _case_weight(self, batch: Batch) -> float:
        return self.objective.case_weight(batch.cases, batch.outputs)

    def _updated_factors(
        self, point: Point, before: State, k: int
    ) -> tuple[KroneckerFactors, Tensor]:
        """The moving averages with S₁ in them, and the generator's state after its draws [§5]."""
        generator = torch.Generator(device=point.gradient[0].device)
        generator.set_state(before.generator)
        fisher = self.settings.fisher
        factors = estimate(
            self.model,
            self.layers,
            self.objective,
            point.batch.first(self.settings.statistics_fraction),
            self._case_weight(point.batch),
            fisher,
            generator,
            self.settings.inverse.needs_neighbours,
            before.factors,
            ema_decay(k, fisher.ema_decay),
        )
        return factors, generator.get_state()

    def _best_proposal(
        self,
        point: Point,
        before: State,
        factors: KroneckerFactors,
        watch: Stopwatch,
        events: list[Event],
    ) -> _Proposal:
        """The proposal with the lowest M(δ), or h(θ + δ), among the candidates for γ [§6.6]."""
        k = before.iteration + 1
        settings = self.settings
        stale = before.inverse
        if stale is not None and k > FIRST_REFRESHES and k % settings.inverse_interval:
            return self._propose(point, before, factors, before.gamma, stale, before.decayed, watch)
        best: _Proposal | None = None
        failure: Exception | None = None
        candidates = settings.gamma.candidates(k, before.gamma, before.lambda_, point.weight_decay)
        try:
            with watch("inverse"):
                prepared = settings.inverse.prepare(factors)
        except (NonFiniteError, NotPositiveDefiniteError) as error:
            candidates, failure = (), error
        for gamma in candidates:
            try:
                with watch("inverse"):
                    damped = prepared.damped(gamma)
                    decayed = self._decayed(damped, point)
            except (NonFiniteError, NotPositiveDefiniteError) as error:
                failure = error
                events.append(Event("candidate_failed", f"γ = {gamma:.4g}: {error}"))
                continue
            proposal = self._propose(point, before, factors, gamma, damped, decayed, watch)
            best = self._better(point, best, proposal, len(candidates) > 1, watch)
        if best is not None:
            return best
        assert failure is not None
        _check_finite(point, factors, self.layers)
        if stale is None:
            raise failure
        events.append(Event("refresh_failed", f"The inverse stays as it was: {failure}"))
        return self._propose(point, before, factors, before.gamma, stale, before.decayed, watch)

    def _better(
        self,
        point: Point,
        best: _Proposal | None,
        proposal: _Proposal,
        searching: bool,
        watch: Stopwatch,
    ) -> _Proposal:
        if searching and self.settings.gamma.criterion == "objective":
            with watch("reduction_ratio"):
                change = self._objective_change(point, proposal)
            # NaN is never the lowest.
            change = math.inf if math.isnan(change) else change
            proposal = replace(proposal, change=change)
            if best is None or best.change is None or change < best.change:
                return proposal
            return best
        if best is None or proposal.step.predicted_change < best.step.predicted_change:
            return proposal
        return best

    def _decayed(self, damped: DampedInverse, point: Point) -> Matrices | None:
        """η F̆⁻¹θ, kept apart for the low-rank route [§8]."""
        if point.rows is None or point.weight_decay == 0:
            return None
        return tuple(U * point.weight_decay for U in damped.mv(self._theta()))

    def _propose(
        self,
        point: Point,
        before: State,
        factors: KroneckerFactors,
        gamma: float,
        inverse: DampedInverse,
        decayed: Matrices | None,
        watch: Stopwatch,
    ) -> _Proposal:
        """Δ and the best δ = αΔ + μδ₀ with the exact Fisher on S₂ [§6.4, §7]."""
        with watch("direction"):
            if point.rows is not None:
                assert isinstance(inverse, DampedBlockDiagonal)
                product = inverse.mv_low_rank(point.gradient, point.rows, decayed)
            else:
                product = inverse.mv(point.gradient)
            directions = [tuple(U.neg_() for U in product)]
            if before.previous_delta is not None:
                directions.append(before.previous_delta)
        with watch("fisher_products"):
            gram = fisher_gram(
                self.model,
                self.layers,
                self.objective.likelihood,
                point.batch.first(self.settings.fisher_fraction),
                self._case_weight(point.batch),
                directions,
            )
        with watch("step_size"):
            count = len(directions)
            seen = point.batch.seen_loss
            # All that the host has to know, in the step's one synchronisation.
            numbers = torch.cat(
                [
                    gram.reshape(-1),
                    _inner_products(directions, point.gradient),
                    point.loss.double().reshape(1),
                    (point.loss if seen is None else seen).double().reshape(1),
                    _health(factors).reshape(1),
                ]
            ).cpu()
            loss, seen_value, _ = numbers[-3:].tolist()
            if not bool(numbers.isfinite().all()):
                _check_finite(point, factors, self.layers)
                raise RefusedError("The curvature of the step is not finite.")
            fisher = numbers[: count**2].reshape(count, count)
            inner, r = numbers[count**2 : -3].reshape(count + 1, count).split([count, 1])
            Q = fisher + (before.lambda_ + point.weight_decay) * inner
            precision = torch.finfo(point.gradient[0].dtype).eps
            step = self.settings.step_size.solve(Q, r[0], precision)
            if not math.isfinite(step.predicted_change):
                raise RefusedError("The predicted change of the objective is not finite.")
            delta = _combine(directions, step.coefficients)
        return _Proposal(
            gamma=gamma,
            inverse=inverse,
            decayed=decayed,
            step=step,
            delta=delta,
            loss=loss,
            loss_seen=seen is not None
            and abs(loss - seen_value)
            <= LOSS_TOLERANCE * precision * max(abs(loss), abs(seen_value)),
        )

    def _objective_change(self, point: Point, proposal: _Proposal) -> float:
        """h(θ + δ) − h(θ) on S′, weight decay included, by a forward pass [§6.5]."""
        batch, delta = point.batch, proposal.delta
        if proposal.loss_seen:
            assert batch.seen_loss is not None
            moved = self._parameters_at(delta)
            old = batch.seen_loss.double()
            new = torch.zeros((), dtype=torch.float64, device=old.device)
            for call in batch.calls:
                assert call.targets is not None
                outputs = call.run(self.model, moved)
                new = new + self.objective.total(outputs, call.targets, batch.cases).double()
        else:
            old, new = point.loss.double(), point.reevaluate(delta).double()
        change = new - old
        if point.weight_decay:
            # η/2 (‖θ + δ‖² − ‖θ‖²) without the cancellation.
            change = change + point.weight_decay * (
                _dot(self._theta(), delta) + _dot(delta, delta) / 2
            )
        return float(change)

    def _theta(self) -> Matrices:
        return tuple(layer.join(layer.parameters()) for layer in self.layers)

    def _parameters_at(self, delta: Matrices) -> dict[str, Tensor]:
        """θ + δ by the parameters' names."""
        return {
            name: parameter + part
            for layer, V in zip(self.layers, delta, strict=True)
            for name, parameter, part in zip(
                layer.parameter_names(), layer.parameters(), layer.split(V), strict=True
            )
        }


def _inner_products(directions: Sequence[Matrices], gradient: Matrices) -> Tensor:
    """v_iᵀv_j and, in a last row, ∇hᵀv_j, flattened, in float64.

    Layer by layer, all products of a layer in turn: they are bound by memory, and a layer's matrices
    stay in the cache.
    """
    total = torch.zeros((), dtype=torch.float64, device=gradient[0].device)
    for *V, g in zip(*directions, gradient, strict=True):
        rows = [v.reshape(-1) for v in (*V, g)]
        lower = [
            [torch.dot(rows[i], rows[j]) for j in range(min(i + 1, len(V)))]
            for i in range(len(rows))
        ]
        products = [lower[max(i, j)][min(i, j)] for i in range(len(rows)) for j in range(len(V))]
        total = total + torch.stack(products).double()
    return total


def _dot(u: Matrices, v: Matrices) -> Tensor:
    """uᵀv in float64."""
    parts = [torch.dot(a.reshape(-1), b.reshape(-1)).double() for a, b in zip(u, v, strict=True)]
    return torch.stack(parts).sum()


def _combine(directions: Sequence[Matrices], coefficients: Sequence[float]) -> Matrices:
    """Σ_j c_j v_j, in the memory of the first direction."""
    total = [V.mul_(coefficients[0]) for V in directions[0]]
    for direction, c in zip(directions[1:], coefficients[1:], strict=True):
        for V, W in zip(total, direction, strict=True):
            V.add_(W, alpha=c)
    return tuple(total)


def _health(factors: KroneckerFactors) -> Tensor:
    """A number that is finite if the diagonals of all factors are."""
    return torch.stack([M.diagonal().sum() for M in (*factors.A, *factors.G)]).double().sum()


def _check_finite(point: Point, factors: KroneckerFactors, layers: Sequence[Layer]) -> None:
    """Raise `RefusedError` with the first cause of non-finite numbers, if there is one."""
    if not bool(point.loss.isfinite()):
        raise RefusedError(f"The loss is {float(point.loss)}.")
    for layer, V in zip(layers, point.gradient, strict=True):
        if not bool(V.isfinite().all()):
            raise RefusedError(f"The gradient of layer {layer.name!r} is not finite.")
    for layer, A, G in zip(layers, factors.A, factors.G, strict=True):
        if not bool(A.isfinite().all() and G.isfinite().all()):
            raise RefusedError(f"The statistics of layer {layer.name!r} are not finite.")
