"""What a step changes, all or nothing: evaluate, validate, compute, commit.

`validation.py` and `step.py` compute and touch nothing; here the result is committed.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from kronfac.closure_call import evaluate
from kronfac.conditions import Conditions
from kronfac.distributed import Holders, Processes, Ranks
from kronfac.divided_refresh import hold
from kronfac.errors import RankError
from kronfac.evaluation import Evaluation, Point, RefusedError
from kronfac.grad_scaler import Scaling
from kronfac.gradient_check import GradientCheck
from kronfac.groups import Groups, PerParameter
from kronfac.interrupts import Allowed, Waiting, poll
from kronfac.iterate_average import IterateAverage
from kronfac.loop import evaluate_loop
from kronfac.network import Batch, Network, StandingRecorder, restore
from kronfac.planning import Plan, World, untouched
from kronfac.precision import Context, full_precision
from kronfac.report import (
    NOT_ZEROED,
    Event,
    EventKind,
    EventWarnings,
    StepReport,
    Stopwatch,
    log_events,
)
from kronfac.settings import Settings
from kronfac.spreading import spread_out
from kronfac.state import State
from kronfac.state_groups import MOMENTUM
from kronfac.step import Transition, agree, compute_step
from kronfac.transaction import Before
from kronfac.validation import Validation, in_turn, suspects, validate


class SteppingOptimizer(torch.optim.Optimizer):
    """An optimizer that has all that a step needs, and takes it."""

    model: nn.Module
    settings: Settings
    network: Network
    report: StepReport | None
    _state: State
    _check: GradientCheck
    _recorder: StandingRecorder
    _verbose: bool
    _warn_of_events: EventWarnings
    _wrapped: bool | None
    """Whether something averages gradients over ranks, as DistributedDataParallel does; None if that is not
    known yet."""
    _conditions: Conditions
    _changed: bool
    """Whether somebody has written to the parameters since the last step."""
    _before: Before
    """What an exception in the step that is under way goes back to."""

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        """One step; after an exception or a signal everything is as it was before."""
        with Waiting():
            before = self._before = Before(self)
            try:
                if self.network.shards is not None:
                    self.network.shards.pull()
                self._changed = self._conditions.changed(self.network)
                ended, returned = self._ends_loop(closure)
                self._check.last_of_several = ended
                with full_precision(self.network.device) as callers, self._recorder.paused():
                    result = self._step(None if ended else closure, callers)
                self._recorder.step()
                poll()
            except BaseException as error:
                if not isinstance(error, RankError):  # which all ranks know of
                    Processes.current().abandon()
                before.put_back()
                raise
            finally:
                del self._before  # which has copies
                if self.network.shards is not None:
                    self.network.shards.forget_gradients()
                self._conditions.leave(self.network)
        if self.report is not None and self.report is not before.report:
            if self.report.refused:
                before.forget_learned()
            self._warn_of_events(self.report)
            log_events(self.report)
        return returned if ended else result

    def _step(self, closure: Callable[[], Any] | None, callers: Context) -> Any:
        watch = Stopwatch()
        buffers = self.network.buffers.snapshot()
        with watch("gradient"):
            found = self._evaluate(closure, callers) if closure else self._evaluate_loop()
        if found is None:
            return None
        evaluation = found
        if self._verbose and not self._state.iteration and self.report is None:
            print(self._plan(evaluation.network, evaluation.batch))
        # The loss of a step that is computed already tells, without another synchronisation, whether the
        # step before it has to be validated out of turn.
        validates = in_turn(self.settings, self._state)
        outcome = None if validates else self._compute(evaluation, watch)
        validation, outlier = None, False
        if outcome is None or self._suspects(evaluation, outcome):
            outcome = None
            with watch("reduction_ratio"):
                validation, outlier = self._validate(evaluation)
            if validation is not None and validation.rejected is not None:
                if closure is None:  # the gradient is that of a point that has been left
                    self.report = self._skip(evaluation, watch, validation)
                    return None
                self._forget_gradients()
                restore(buffers)
                with watch("gradient"):
                    evaluation = self._evaluate(closure, callers)
            outcome = self._compute(evaluation, watch, outlier)
        agree(evaluation.spread.world, outcome)
        report = self._commit(evaluation, outcome, watch)
        if validation is not None:
            events = () if validation.event is None else (validation.event,)
            report = replace(report, next_rho=validation.rho, events=events + report.events)
        if not report.refused:
            notes = self._conditions.notes(evaluation, self._state, report, self._changed)
            report = replace(report, notes=notes)
        self.report = report
        return evaluation.returned

    def _ends_loop(self, closure: Callable[[], Any] | None) -> tuple[bool, Any]:
        """Whether a closure, which is called, has the last of several micro-batches; and its loss.

        If it drops the gradients before it, these were not for this step: it will be called again.
        """
        earlier = self._recorder.records
        if closure is None or not earlier:
            return False, None
        self._before.keep_gradients()
        with torch.enable_grad(), Allowed():
            returned = closure()
        kept = {id(record) for record in self._recorder.records}
        return all(id(record) in kept for record in earlier), returned

    def _evaluate(self, closure: Callable[[], Any], callers: Context) -> Evaluation:
        def own() -> Evaluation:
            return evaluate(
                closure,
                self.model,
                self.network,
                weight_decay=PerParameter.of_groups(self._own_groups, "weight_decay"),
                inverse=self.settings.inverse,
                callers=callers,
            )

        evaluation = self._spread_out(own)
        assert evaluation is not None
        with self.network.buffers.preserved():
            return self._check(evaluation, self._state.iteration + 1, measured=self._measured)

    def _evaluate_loop(self) -> Evaluation | None:
        """What a loop without a closure has computed; None if there is nothing to take a step from."""
        scaling = Scaling.of(self)
        if scaling.scale is not None:
            self._before.keep_gradients()

        def own() -> Evaluation | None:
            return evaluate_loop(
                self._recorder,
                self.network,
                weight_decay=PerParameter.of_groups(self._own_groups, "weight_decay"),
                inverse=self.settings.inverse,
                scaling=scaling,
            )

        evaluation = self._spread_out(own)
        if evaluation is None:
            return None
        if not evaluation.comparable():
            self._check.warn_of_unseen_loss(evaluation, self._recorder.others.names)
        if self._recorder.watch.added_to_old:
            self._check.warn_of_old_gradients()
            return evaluation
        with self.network.buffers.preserved():
            return self._check(
                evaluation, self._state.iteration + 1, scaling.unscaled, self._measured
            )

    @property
    def _measured(self) -> bool:
        """Whether ρ of the step that is being made is wanted, of itself or on the next mini-batch."""
        measures, iteration = self.settings.damping.measures, self._state.iteration + 1
        return measures(iteration) == "own" or measures(iteration + 1) == "next"

    def _spread_out(self, own: Callable[[], Evaluation | None]) -> Evaluation | None:
        """This rank's evaluation as part of that of all ranks."""
        iteration = self._state.iteration + 1
        evaluation, self._wrapped = spread_out(
            Processes.current(), own, iteration=iteration, wrapped=self._wrapped
        )
        return evaluation

    def _forget_gradients(self) -> None:
        """Drop all gradients, so that a closure does not add to them."""
        for p in (*self.network.parameters, *self.network.given):
            p.grad = None

    def _suspects(self, evaluation: Evaluation, outcome: Transition | RefusedError) -> bool:
        """Whether the loss on this mini-batch calls for a validation of the last step out of turn."""
        if not evaluation.comparable():
            return False
        if isinstance(outcome, RefusedError):
            loss, penalty = float(evaluation.returned_loss), None
        else:
            pending = outcome.state.acceptance.pending
            assert pending is not None
            loss, penalty = pending.loss, pending.penalty
        return suspects(self.settings, evaluation, self._state, loss, penalty)

    def _validate(self, evaluation: Evaluation) -> tuple[Validation | None, bool]:
        """Validate the last step on this mini-batch, and commit what that says; roll back a rejected step.

        Also whether the mini-batch itself is an outlier, so that a step from it has to be validated too.
        """
        loss = float(evaluation.returned_loss)
        outlier = suspects(self.settings, evaluation, self._state, loss)
        with evaluation.network.buffers.preserved():
            validation = validate(self.settings, evaluation, self._state)
        if validation is None:
            return None, outlier
        if (rejected := validation.rejected) is not None:
            outlier = False  # it was the step
            if self._check.memory.adds and validation.event is not None:
                validation = replace(validation, event=replace(validation.event, advice=NOT_ZEROED))
            self._before.keep_parameters()
            if rejected.kept is not None and not self._changed:
                evaluation.network.place(rejected.kept.theta)
            else:
                evaluation.network.move(rejected.delta, -1.0)
        self._state = validation.state
        self._publish_momentum()
        return validation, outlier

    def _compute(
        self, evaluation: Evaluation, watch: Stopwatch, outlier: bool = False
    ) -> Transition | RefusedError:
        """The step from this mini-batch, or why there is none."""
        with watch("gradient"):
            point = Point.of(evaluation)
        state = self._held_state(evaluation.spread.world)
        try:
            with evaluation.network.buffers.preserved():
                return compute_step(
                    self.settings, point, state, watch, outlier=outlier, rates=self._rates
                )
        except RefusedError as refusal:
            return refusal

    def _held_state(self, world: Ranks) -> State:
        """The state with what of the inverse this process is to hold: a loaded one has all of it."""
        state = self._state
        if state.current is None or state.curvature is None:
            return state
        holders = Holders.of(world, self.settings.inverse_share)
        held = hold(state.current.inverse, state.curvature, holders)
        if held is state.current.inverse:
            return state
        return replace(state, current=replace(state.current, inverse=held))

    def _commit(
        self, evaluation: Evaluation, outcome: Transition | RefusedError, watch: Stopwatch
    ) -> StepReport:
        """Take the step: all or nothing."""
        if isinstance(outcome, RefusedError):
            return self._refusal(evaluation, watch, outcome)
        with watch("commit"):
            average = self._averaged(evaluation.network)
            if self._rates:
                self._before.keep_parameters()
            self.network = evaluation.network
            self.network.learned.compared = True
            self.network.learned.placement = self.network.placement
            if self._rates:  # or nothing moves, not even a zero's sign
                self.network.move(outcome.delta)
            self._become(replace(outcome.state, average=average))
            # Not before: nobody would want that of a step that is not taken.
            if outcome.state.refresh is not None:
                outcome.state.refresh.outcomes.begin()
        return outcome.report

    def _averaged(self, network: Network) -> IterateAverage | None:
        """The average of the iterates with the one that a step starts from, which was a step's end."""
        decay = self.settings.average_decay
        if decay is None or not self._state.iteration:
            return None
        return (self._state.average or IterateAverage()).updated(network.theta(), decay)

    @property
    def _own_groups(self) -> Groups:
        """The groups with the parameters that K-FAC computes with: whole ones in the place of shards."""
        shards = self.network.shards
        if shards is None:
            return self.param_groups
        return [
            {**group, "params": [shards.whole(p) for p in group["params"]]}
            for group in self.param_groups
        ]

    @property
    def _rates(self) -> PerParameter:
        """The learning rate of every parameter."""
        return PerParameter.of_groups(self._own_groups, "lr")

    def _become(self, state: State) -> None:
        """Replace the state; a refresh under way that the new one does not go on with is given up."""
        under_way, self._state = self._state.refresh, state
        self._publish_momentum()
        if under_way is not None and under_way is not state.refresh:
            under_way.outcomes.give_up()

    def _publish_momentum(self, anyway: bool = False) -> None:
        """Show the momentum buffer in `state`, where torch looks for what belongs to a parameter.

        To be read: K-FAC goes on from its own state. Before the first step there is nothing to show, or
        `anyway` zeros.
        """
        vector = self._state.step.momentum
        if vector is None and not self.state and not anyway:
            return
        parameters = self.network.parameters
        buffers = (
            map(torch.zeros_like, parameters) if vector is None else self.network.split(vector)
        )
        for p, buffer in zip(self.network.given, buffers, strict=True):
            self.state[p][MOMENTUM] = buffer

    def _refusal(
        self, evaluation: Evaluation, watch: Stopwatch, refusal: RefusedError
    ) -> StepReport:
        gamma = self._state.gamma
        return StepReport(
            iteration=self._state.iteration + 1,
            loss=float(evaluation.returned_loss) if evaluation.comparable() else math.nan,
            lambda_=self._state.damping.lambda_,
            gamma=math.nan if gamma is None else gamma.gamma,
            examples=evaluation.examples,
            seconds=watch.seconds,
            events=(Event(refusal.cause, str(refusal)), Event(EventKind.REFUSED, str(refusal))),
        )

    def _skip(self, evaluation: Evaluation, watch: Stopwatch, validation: Validation) -> StepReport:
        """A mini-batch that has rejected the last step, whose gradient is not used."""
        assert validation.event is not None
        skipped = self._refusal(evaluation, watch, RefusedError())
        return replace(skipped, next_rho=validation.rho, events=(validation.event,))

    def _plan(self, network: Network, batch: Batch, world: World | None = None) -> Plan:
        from kronfac.planning.make import make_plan  # noqa: PLC0415, so that `import kronfac` is quick

        with untouched(network):
            weight_decay = PerParameter.of_groups(self._own_groups, "weight_decay")
            return make_plan(network, batch, self.settings, weight_decay.largest, world)
