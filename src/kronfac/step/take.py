"""One step, in running order: evaluate, validate the last step, compute, commit.

Everything before the commit works on copies: the state is a value, and so is the network but for what its
passes show, which is copied.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kronfac.check import NOT_ZEROED_WARNING, check
from kronfac.control import NO_MEMORY, Pending
from kronfac.distributed import World
from kronfac.groups import PerParameter
from kronfac.model import Matrices, restore
from kronfac.model.side_effects import Context, full_precision
from kronfac.report import REJECTED_BY, Event, EventKind, StepReport, Stopwatch
from kronfac.settings import Settings
from kronfac.step.collect import Scaling, evaluate_closure, evaluate_loop, join_ranks
from kronfac.step.commit import Snapshot, Stepping, all_or_nothing, uninterrupted
from kronfac.step.evaluation import Evaluation, RefusedError
from kronfac.step.examples import choose_examples, update_curvature
from kronfac.step.first_damping import with_first_damping
from kronfac.step.proposal import ONE, Proposer, apply_rates
from kronfac.step.refresh import best_proposal
from kronfac.step.state import State
from kronfac.step.validation import Validation, compare_average, pending, validate
from kronfac.warn import warn_once

Closure = Callable[[], Any]


def take_step(optimizer: Stepping, closure: Closure | None, changed: bool) -> Any:
    """Take one step; after an exception or Ctrl-C everything is as it was before, or after the step.

    Args:
        optimizer: a `KFAC`.
        closure: computes loss and gradients; None to use the gradients in the parameters.
        changed: whether the parameters were changed from outside since the last step.
    """
    with all_or_nothing(optimizer) as snapshot:
        ended, returned = _end_loop(optimizer, closure, snapshot)
        closure = None if ended else closure
        device = optimizer.network.device
        with full_precision(device) as callers, optimizer._recorder.paused():
            step = _Attempt(optimizer, snapshot, callers)
            evaluation = step.evaluate(closure)
            if evaluation is None:
                optimizer._recorder.step()
                return returned
            last = step.validate(evaluation)
            if last.rejected is not None:
                step.roll_back(evaluation, last.rejected, changed)
                if closure is None:  # the gradient is that of a point that has been left
                    step.skip(evaluation, last)
                    return returned
                evaluation = step.evaluate_again(closure)
            outcome = step.compute(evaluation, last.outlier)
            if evaluation.world.size > 1:
                agree(evaluation, outcome)
            step.commit(evaluation, outcome, last)
    return returned if ended else evaluation.returned


def _end_loop(optimizer: Stepping, closure: Closure | None, snapshot: Snapshot) -> tuple[bool, Any]:
    """Call a closure that may end a loop of micro-batches: whether it does, and the value it returned.

    If it drops earlier gradients, they were not for this step: the closure is then called again.
    """
    earlier = optimizer._recorder.records
    if closure is None or not earlier:
        return False, None
    snapshot.keep_gradients()
    with torch.enable_grad():
        returned = closure()
    kept = {id(record) for record in optimizer._recorder.records}
    if all(id(record) in kept for record in earlier):
        return True, returned
    return False, None


@dataclass(frozen=True)
class Transition:
    """A step, computed and not yet taken."""

    delta: Matrices
    state: State
    report: StepReport


class _Attempt:
    """A step in progress, with the network and the state that it will leave.

    Args:
        optimizer: a `KFAC`, unchanged until the commit.
        snapshot: of the optimizer and its model.
        callers: the caller's autocast, which the closure runs in.
    """

    def __init__(self, optimizer: Stepping, snapshot: Snapshot, callers: Context) -> None:
        self.optimizer, self.snapshot, self.callers = optimizer, snapshot, callers
        self.settings, self.state = optimizer.settings, optimizer._state
        self.network = replace(optimizer.network, learned=optimizer.network.learned.copy())
        self.weight_decay = PerParameter.of_groups(optimizer.param_groups, "weight_decay")
        self.rates = PerParameter.of_groups(optimizer.param_groups, "lr")
        self.watch = Stopwatch()
        self._buffers = self.network.buffers.snapshot()

    def evaluate(self, closure: Closure | None) -> Evaluation | None:
        """Loss and gradient at θ, checked; None if there is nothing to take a step from."""
        with self.watch("gradient"):
            if closure is None:
                return self._evaluate_loop()
            own = evaluate_closure(
                closure,
                self.optimizer.model,
                self.network,
                weight_decay=self.weight_decay,
                inverse=self.settings.inverse,
                callers=self.callers,
            )
            evaluation = self._join_ranks(own)
            return None if evaluation is None else self._checked(evaluation)

    def _evaluate_loop(self) -> Evaluation | None:
        recorder, scaling = self.optimizer._recorder, Scaling.of(self.optimizer)
        if scaling.scale is not None:
            self.snapshot.keep_gradients()
        own = evaluate_loop(
            recorder,
            self.network,
            weight_decay=self.weight_decay,
            inverse=self.settings.inverse,
            scaling=scaling,
        )
        evaluation = self._join_ranks(own)
        if evaluation is not None and recorder.since.added_to_old:
            warn_once(self.optimizer._warned, "zero_grad", NOT_ZEROED_WARNING)
            return evaluation
        return None if evaluation is None else self._checked(evaluation, scaling.unscaled)

    def _join_ranks(self, own: Evaluation | None) -> Evaluation | None:
        iteration, optimizer = self.state.iteration + 1, self.optimizer
        evaluation, optimizer._wrapped = join_ranks(
            World.current(), own, iteration=iteration, averaged=optimizer._wrapped
        )
        return evaluation

    def _checked(self, evaluation: Evaluation, unscaled: bool = False) -> Evaluation:
        """The evaluation as the step may take it, by `kronfac.check` if that is due."""
        batch, gradients = evaluation.batch, self.state.gradients
        if batch.traced:
            return evaluation  # the gradient is K-FAC's own
        measures, iteration = self.settings.damping.measures, self.state.iteration + 1
        measured = measures(iteration) == "own" or measures(iteration + 1) == "next"
        due = unscaled or gradients.due(iteration, measured)
        if not (due or evaluation.without_gradient or batch.outside or batch.assumed):
            return evaluation.scaled(gradients.scale)
        with self.network.buffers.preserved():
            found, gradients = check(
                evaluation, gradients, self.optimizer._left_out, due=due, unscaled=unscaled
            )
        self.state = replace(self.state, gradients=gradients)
        for kind, message in found.warnings.items():
            warn_once(self.optimizer._warned, kind, message)
        return found.evaluation

    def validate(self, evaluation: Evaluation) -> Validation:
        """The last step on this mini-batch, before a new one is computed."""
        with self.watch("reduction_ratio"), evaluation.network.buffers.preserved():
            last = validate(self.settings, evaluation, self.state)
        self.state = last.state
        if last.events and self.optimizer._recorder.since.added_to_old:
            advice = REJECTED_BY["gradients"]
            return replace(last, events=tuple(replace(e, advice=advice) for e in last.events))
        return last

    def roll_back(self, evaluation: Evaluation, rejected: Pending, changed: bool) -> None:
        """θ ← θ − δ, of the step that is rejected."""
        if rejected.kept is not None and not changed:
            evaluation.network.place(rejected.kept.theta)
        else:
            evaluation.network.move(rejected.delta, -1.0)

    def evaluate_again(self, closure: Closure) -> Evaluation:
        """Loss and gradient at the parameters that a rejected step started from."""
        for p in self.network.parameters:
            p.grad = None  # or the closure would add to them
        restore(self._buffers)
        evaluation = self.evaluate(closure)
        assert evaluation is not None
        return evaluation

    def compute(self, evaluation: Evaluation, outlier: bool) -> Transition | RefusedError:
        """The step from this mini-batch, or why there is none."""
        with self.watch("gradient"):
            _ = evaluation.gradient  # computed once, and kept
        try:
            with evaluation.network.buffers.preserved():
                return compute_step(
                    self.settings,
                    evaluation,
                    self.state,
                    self.watch,
                    outlier=outlier,
                    rates=self.rates,
                )
        except RefusedError as refusal:
            return refusal

    def commit(
        self, evaluation: Evaluation, outcome: Transition | RefusedError, last: Validation
    ) -> None:
        """θ ← θ + δ with the state after it; a refused step leaves both as they were before it."""
        with self.watch("commit"), uninterrupted():
            if isinstance(outcome, RefusedError):
                causes = Event(outcome.cause, str(outcome)), Event(EventKind.REFUSED, str(outcome))
                # The findings of a refused step about gradients are dropped.
                self.state = replace(self.state, gradients=self.optimizer._state.gradients)
                self._become(self._report(evaluation, last, causes))
                return
            network = replace(evaluation.network, placed=evaluation.network.placement)
            network.learned.compared = True
            if self.rates:  # or nothing moves, not even a zero's sign
                network.move(outcome.delta)
            self.optimizer.network, self.state = network, outcome.state
            report = outcome.report
            self._become(replace(report, next_rho=last.rho, events=(*last.events, *report.events)))
            # Only now: a step that is not taken needs no refresh.
            if outcome.state.refresh is not None:
                outcome.state.refresh.begin()

    def skip(self, evaluation: Evaluation, last: Validation) -> None:
        """Commit the rejection of the last step; this mini-batch's gradient is not used."""
        with uninterrupted():
            self.optimizer.network = self.network
            self._become(self._report(evaluation, last, ()))

    def _become(self, report: StepReport) -> None:
        """Replace the optimizer's state."""
        optimizer = self.optimizer
        optimizer.report = report
        optimizer._become(self.state)
        optimizer._recorder.step()
        self.snapshot.committed = True

    def _report(
        self, evaluation: Evaluation, last: Validation, events: tuple[Event, ...]
    ) -> StepReport:
        """The report of a call that takes no step."""
        gamma = self.state.gamma
        return StepReport(
            iteration=self.state.iteration + 1,
            loss=float(evaluation.returned_loss),
            lambda_=self.state.damping.lambda_,
            gamma=math.nan if gamma is None else gamma.gamma,
            next_rho=last.rho,
            examples=evaluation.examples,
            seconds=self.watch.seconds,
            events=(*last.events, *events),
        )


def compute_step(
    settings: Settings,
    evaluation: Evaluation,
    before: State,
    watch: Stopwatch,
    *,
    outlier: bool = False,
    rates: PerParameter = ONE,
) -> Transition:
    """The step from this mini-batch and the state after it.

    The next mini-batch validates a step from an `outlier`. (α, μ) are solved for a learning rate of 1;
    `rates` then scale the step and its predicted change.

    Raises:
        RefusedError: loss, gradient, statistics or step are not finite.
    """
    m = before.measure(evaluation)
    memory = None if m.trusted else settings.step_rule.long_memory
    step_state = before.step
    with watch("reduction_ratio"):
        if memory is not None:
            step_state = compare_average(memory, evaluation, step_state, m)
    with watch("statistics"):
        some = choose_examples(settings, evaluation, m)
        curvature, current, generator = update_curvature(settings, evaluation, some, before, m)
        before = replace(before, current=current)
    proposer = Proposer(
        evaluation,
        some.fisher,
        some.fisher_total,
        curvature,
        settings.step_rule,
        step_state,
        m,
        watch,
    )
    trials = 0
    if m.iteration == 1:
        with watch("first_lambda"):
            before, trials = with_first_damping(settings, proposer, before)
        m = before.measure(evaluation)
        proposer = replace(proposer, measurement=m)
    chosen = best_proposal(settings, proposer, before)
    with watch("step_rule"):
        best = apply_rates(proposer, chosen.proposal, rates)
    predicted = best.step.predicted_change
    after = replace(
        chosen.measurement,
        loss=best.loss,
        gamma=best.gamma,
        candidates=chosen.candidates,
        predicted_change=predicted,
        curvature_share=best.curvature_share,
    )
    damping, rho = before.damping, None
    if settings.damping.measures(m.iteration) == "own" and predicted != 0:
        with watch("reduction_ratio"):
            rho = evaluation.change(best.delta) / predicted
        # Without re-scaling M may predict a rise, for which ρ ≈ 1 says nothing good.
        after = replace(after, rho=math.nan if predicted > 0 else rho)
        damping = settings.damping.update(damping, after)
    remembered = NO_MEMORY
    if memory is not None:
        theta = evaluation.network.theta() if memory.averages(m) else None
        remembered = memory.average(step_state.memory, m, theta)
    assert before.gamma is not None
    alpha, *mu = best.step.coefficients
    return Transition(
        delta=best.delta,
        state=State(
            iteration=m.iteration,
            generator=generator,
            damping=damping,
            gamma=settings.gamma.update(before.gamma, after),
            step=replace(step_state, momentum=best.momentum, memory=remembered),
            acceptance=replace(
                before.acceptance,
                pending=pending(settings, evaluation, before, best, m, outlier),
            ),
            curvature=curvature,
            current=chosen.current,
            refresh=chosen.refresh,
            gradients=before.gradients,
        ),
        report=StepReport(
            iteration=m.iteration,
            loss=best.loss,
            lambda_=damping.lambda_,
            gamma=best.gamma,
            alpha=alpha,
            mu=mu[0] if mu else None,
            rho=rho,
            predicted_change=predicted,
            examples=m.examples,
            mean_loss=best.loss / (m.examples if m.summed else 1),
            memory=1.0 if memory is None else memory.horizon(step_state.memory, m),
            trials=trials,
            seconds=watch.seconds,
            events=chosen.events if evaluation.loss_seen else (*chosen.events, _LOSS_NOT_SEEN),
        ),
    )


_LOSS_NOT_SEEN = Event(
    EventKind.LOSS_NOT_SEEN,
    "The closure's loss is not the loss module's value on the model's outputs; the curvature is that of "
    "the loss module, and ρ calls the closure again.",
)


def agree(evaluation: Evaluation, outcome: Transition | RefusedError) -> None:
    """Check that all ranks have computed the same step.

    Raises:
        RankError: their steps differ.
    """
    step = [0.0] * 4
    if isinstance(outcome, Transition):
        r = outcome.report
        step = [1.0, r.loss, r.predicted_change or 0.0, r.alpha or 0.0]
    what = "steps (taken, loss, predicted change, α)"
    evaluation.world.agree(step, "commit", what)
