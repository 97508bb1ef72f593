"""One update, computed from a point and the state before it, in the order of [MG15 §9].

Nothing here changes anything: what a step finds comes back as a `Transition`, for the optimizer to
commit or to drop.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kronfac.factors import KroneckerFactors, ema_decay
from kronfac.first_damping import first_lambda
from kronfac.inverses import DampedInverse
from kronfac.iterate_average import memory_length
from kronfac.layers import Matrices
from kronfac.minibatch import Batch
from kronfac.point import Network, Point, check_finite, objective_change
from kronfac.proposal import Proposal, propose
from kronfac.refresh import Computed, Refresh
from kronfac.report import Event, StepReport, Stopwatch
from kronfac.settings import Settings
from kronfac.state import LastStep, State
from kronfac.statistics import estimate
from kronfac.step_size import Past


@dataclass(frozen=True)
class Transition:
    """A step, computed and not yet taken."""

    delta: Matrices
    state: State
    report: StepReport
    far: bool = False
    """See `Proposal`: to take it back, the parameters have to be kept."""


@dataclass(frozen=True)
class Update:
    """The computation of a step for one network."""

    network: Network
    settings: Settings

    def __call__(self, point: Point, before: State, watch: Stopwatch) -> Transition:
        """The step from `point` and the state after it.

        Raises:
            RefusedError: loss, gradient, statistics or step are not finite.
        """
        settings = self.settings
        k = before.iteration + 1
        events: list[Event] = []
        with watch("reduction_ratio"):
            before = replace(
                before, memory=memory_length(self.network, settings.step_size, point, before)
            )
        with watch("statistics"):
            S1, S2 = self._curvature_rows(point.batch)
            factors, generator = self._updated_factors(point, S1, before, k)
        trials = 0
        if k == 1 and settings.damping.searches:
            with watch("first_lambda"):
                lambda_, trials = first_lambda(
                    self.network,
                    point,
                    before,
                    factors,
                    settings.inverse,
                    settings.step_size,
                    S2,
                )
            gamma = settings.gamma.initial(lambda_, point.weight_decay)
            before = replace(before, lambda_=lambda_, gamma=gamma)
        best, before = self._best_proposal(point, S2, before, factors, watch, events)
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
                    change = objective_change(self.network, point, best.loss_seen, best.delta)
            rho = change / best.step.predicted_change
            # Without re-scaling M may predict a rise, of which ρ ≈ 1 says nothing good: NaN raises λ.
            rising = best.step.predicted_change > 0
            lambda_ = settings.damping.updated(lambda_, math.nan if rising else rho)
        alpha, *mu = best.step.coefficients
        memory = settings.step_size.long_memory
        return Transition(
            delta=best.delta,
            state=replace(
                before,
                iteration=k,
                lambda_=lambda_,
                gamma=best.gamma,
                generator=generator,
                factors=factors,
                inverse=best.inverse,
                previous_delta=best.delta,
                remembered=best.remembered,
                decayed=best.decayed,
                last=LastStep(
                    cases=point.batch.cases,
                    loss=best.loss,
                    penalty=best.penalty,
                    predicted_change=best.step.predicted_change,
                    curvature_share=best.curvature_share,
                    kept=None,
                ),
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
                mean_loss=best.loss / self._summed_cases(point),
                memory=1.0 if memory is None else memory.horizon(before.experience),
                trials=trials,
                seconds=watch.seconds,
                events=tuple(events),
            ),
            far=best.far,
        )

    def _summed_cases(self, point: Point) -> int:
        """How many the loss is summed over; 1 for a mean."""
        return point.batch.cases if self.network.objective.reduction == "sum" else 1

    def _curvature_rows(self, batch: Batch) -> tuple[Batch, Batch]:
        """S₁ and S₂: the first rows both, whose way through the network is the same [§8]."""
        settings, cases = self.settings, batch.cases
        S1 = batch.first(settings.statistics_share(cases))
        S2 = batch.first(settings.fisher_share(cases))
        return S1, S2

    def _updated_factors(
        self, point: Point, rows: Batch, before: State, k: int
    ) -> tuple[KroneckerFactors, Tensor]:
        """The moving averages with S₁ in them, and the generator's state after its draws [§5]."""
        generator = torch.Generator(device=point.gradient[0].device)
        generator.set_state(before.generator)
        fisher, memory = self.settings.fisher, self.settings.step_size.long_memory
        remembered = 1.0 if memory is None else memory.statistics(before.experience)
        factors = estimate(
            self.network.model,
            self.network.layers,
            self.network.objective,
            rows,
            self.network.case_weight(point.batch),
            fisher,
            generator,
            self.settings.inverse.needs_neighbours,
            before.factors,
            ema_decay(k, fisher.ema_decay, remembered),
        )
        return factors, generator.get_state()

    def _best_proposal(
        self,
        point: Point,
        rows: Batch,
        before: State,
        factors: KroneckerFactors,
        watch: Stopwatch,
        events: list[Event],
    ) -> tuple[Proposal, State]:
        """The proposal with the lowest M(δ), or h(θ + δ), among the candidates for γ [§6.6].

        The state is `before` with what the search for γ learned.
        """
        k = before.iteration + 1
        settings = self.settings
        stale = before.inverse

        def proposed(gamma: float, inverse: DampedInverse, decayed: Matrices | None) -> Proposal:
            return propose(
                self.network,
                point,
                before,
                factors,
                gamma,
                inverse,
                decayed,
                settings.step_size,
                rows,
                watch,
            )

        renewal = self._refresh(point, before, factors)
        if renewal is None or renewal.adoption > k:
            assert stale is not None
            before = replace(before, refresh=renewal)
            return proposed(before.gamma, stale, before.decayed), before
        best: Proposal | None = None
        failure: Exception | None = None
        with watch("inverse"):
            outcomes = iter(renewal.outcomes)  # waits for those from the background
        for gamma in renewal.candidates:
            with watch("inverse"):
                outcome = next(outcomes)
            if isinstance(outcome, Exception):
                failure = outcome
                events.append(Event("candidate_failed", f"γ = {gamma:.4g}: {failure}"))
                continue
            with watch("inverse"):
                decayed = self._decayed(outcome, point)
            proposal = proposed(gamma, outcome, decayed)
            best = self._better(point, best, proposal, len(renewal.candidates) > 1, watch)
            # Of the loser nothing is left when the next one is made.
            del outcome, decayed, proposal
        before = replace(before, refresh=None)
        if best is not None:
            learned = {
                "gamma_move": settings.gamma.moved(
                    before.gamma_move, renewal.candidates, best.gamma
                ),
                "inverse_iteration": renewal.iteration,
                "inverse_lambda": renewal.lambda_,
            }
            return best, replace(before, **learned)  # type: ignore[arg-type]
        assert failure is not None
        check_finite(point, factors, self.network.layers)
        if stale is None:
            raise failure
        events.append(Event("refresh_failed", f"The inverse stays as it was: {failure}"))
        return proposed(before.gamma, stale, before.decayed), before

    def _refresh(self, point: Point, before: State, factors: KroneckerFactors) -> Refresh | None:
        """The refresh that is under way, or one that starts at this iteration, or none."""
        k, settings = before.iteration + 1, self.settings
        # Of the inverse that is in use, or soon will be.
        lambda_ = before.inverse_lambda if before.refresh is None else before.refresh.lambda_
        drifted = lambda_ is not None and settings.gamma.due(lambda_, before.lambda_)
        if before.refresh is not None and not drifted:
            return before.refresh
        if not (
            before.inverse is None or drifted or settings.refreshes(k, before.inverse_iteration)
        ):
            return None
        past = Past(
            move=before.gamma_move,
            elapsed=k - before.inverse_iteration,
            drifted=drifted,
            confirmed=before.confidence,
            factors=factors,
            case_weight=self.network.case_weight(point.batch),
        )
        candidates = settings.gamma.candidates(
            k, before.gamma, before.lambda_, point.weight_decay, past
        )
        # γ is to follow λ at once where that has moved far; and without an inverse there is no step.
        lag = 0 if drifted or before.inverse is None else settings.lag(k)
        outcomes = Computed(settings.inverse, factors, candidates)
        return Refresh(k, k + lag, before.lambda_, candidates, outcomes)

    def _better(
        self,
        point: Point,
        best: Proposal | None,
        proposal: Proposal,
        searching: bool,
        watch: Stopwatch,
    ) -> Proposal:
        if searching and self.settings.gamma.criterion == "objective":
            with watch("reduction_ratio"):
                change = objective_change(self.network, point, proposal.loss_seen, proposal.delta)
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
        return tuple(U * point.weight_decay for U in damped.mv(self.network.theta()))
