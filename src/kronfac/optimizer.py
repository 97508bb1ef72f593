"""KFAC, the optimizer: evaluate, compute, commit.

`validation.py` and `step.py` compute and touch nothing; here the result is committed, all or nothing.
"""

import math
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn

from kronfac import state as saving
from kronfac.closure import MiniBatchClosure
from kronfac.control import (
    Acceptance,
    AdaptiveDamping,
    AdaptiveGamma,
    AnyDampingRule,
    AnyGammaRule,
    LongMemory,
    QuadraticModel,
    StepRule,
)
from kronfac.curvature import ApproximateInverse, Fisher
from kronfac.distributed import refuse_distributed, refuse_several_processes
from kronfac.evaluation import Evaluation, Point, RefusedError, evaluate
from kronfac.grad_scaler import Scaling
from kronfac.gradient_check import GradientCheck
from kronfac.loop import evaluate_loop
from kronfac.network import (
    Batch,
    Blocks,
    Buffers,
    Network,
    Other,
    StandingRecorder,
    find_units,
    remove_hooks,
    restore,
)
from kronfac.objective import objective_of
from kronfac.parameter_group import ParameterGroup
from kronfac.planning import Plan, make_plan, record_example, untouched
from kronfac.precision import Context, full_precision
from kronfac.report import Event, EventKind, StepReport, Stopwatch
from kronfac.settings import Settings, fisher_of, inverse_of
from kronfac.state import State
from kronfac.step import Transition, compute_step
from kronfac.validation import Validation, in_turn, suspects, validate

ACCEPTANCE = Acceptance()
"""KFAC's own rule for rejecting steps."""
ACCEPT_ALL = Acceptance(rejection=None, suspicion=None)


class KFAC(torch.optim.Optimizer):
    """The paper's whole algorithm: no learning rate, no momentum to choose.

    With g = ∇h(θ) on the mini-batch and F⁰ the Kronecker-factored Fisher, damped by γ:

        Δ = −F⁰⁻¹ g,   (α, μ) = argmin M(αΔ + μδ₀),   θ ← θ + αΔ + μδ₀

    where M is the quadratic model with the exact Fisher, damped by λ, and δ₀ the previous update. While
    mini-batches disagree, the step is shorter, and δ₀ is what many steps have in common (`long_memory.py`).

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> loss_fn = nn.MSELoss()
        >>> optimizer = KFAC(model, loss_fn)
        >>> x = torch.randn(64, 2)
        >>> y = x.prod(dim=1, keepdim=True)
        >>> for _ in range(20):
        ...     loss = optimizer.step(optimizer.closure(x, y))

    Args:
        model: called by the closure.
        loss: the module that the closure calls: `MSELoss`, `BCEWithLogitsLoss`, `CrossEntropyLoss`,
            `kronfac.Gaussian`, `kronfac.Bernoulli` or `kronfac.Categorical`.
        inverse: `"block_diagonal"`, `"block_tridiagonal"`, `"ekfac"`, or an `ApproximateInverse`, class
            or instance.
        weight_decay: η in h(θ) + η/2 ‖θ‖², biases included. The closure leaves it out.
        fisher: `"sampled"`, `"empirical"`, `"exact"`, or an instance of `SampledFisher` and so on,
            for the seed, the number of samples and the moving average's decay.
        damping: λ: `AdaptiveDamping()`, which finds its own start, the paper's `LevenbergMarquardt(…)`
            or `FixedDamping(lambda_)`.
        gamma: γ: `AdaptiveGamma()`, the paper's `GammaSearch(…)`, `FixedGamma(gamma)` or `TiedGamma()`.
        step_size: (α, μ): `QuadraticModel(momentum)`, `RawStep(alpha)`, or `ConjugateGradients(cg_steps)`
            for a longer minimisation of M, as Hessian-free optimisation does.
        acceptance: when a step is validated out of turn and when it is rejected; None accepts every step.
        statistics_fraction: τ₁, the share of the mini-batch that the statistics are taken on; None for
            1/8, or 250 examples if that is more. `First(1 / 8)` takes the first examples, as the authors'
            program does, and makes `fisher_fraction` do so too.
        fisher_fraction: τ₂, the share that the exact-Fisher products are taken on; None for 1/4, or 250
            examples if that is more.
        inverse_interval: T₃, iterations from one refresh of the inverse to the next; None for a quarter
            of the iterations so far, up to 20.
        inverse_lag: iterations from the start of a refresh to its use; if it is not 0 the inverse is
            computed in the background, beside the steps in between. Not in the first iterations.
        clip: a trust region: the step is scaled so that δᵀFδ ≤ clip²; None for none.
        other: what becomes of parameters of layers that KFAC does not know: `"diagonal"` gives them the
            block that fits how the first mini-batch uses them, a diagonal one if that is not seen;
            `"refuse"` raises an error that names them.
        blocks: which curvature block a layer gets, by its kind and size; None for `Blocks()`.
        verbose: whether to print the plan before the first step, see `kronfac.plan`.

    Reference: Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate
    Curvature, 2015. `docs/deviations.md` lists the differences.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        *,
        inverse: str | ApproximateInverse | type[ApproximateInverse] = "block_diagonal",
        weight_decay: float = 0.0,
        fisher: str | Fisher | type[Fisher] = "sampled",
        damping: AnyDampingRule | None = None,
        gamma: AnyGammaRule | None = None,
        step_size: StepRule | None = None,
        acceptance: Acceptance | None = ACCEPTANCE,
        statistics_fraction: float | None = None,
        fisher_fraction: float | None = None,
        inverse_interval: int | None = None,
        inverse_lag: int = 0,
        clip: float | None = None,
        other: Other = "diagonal",
        blocks: Blocks | None = None,
        verbose: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                "KFAC needs the model itself, whose layers it looks at, not its parameters: "
                f"KFAC(model, loss); got a {type(model).__name__}."
            )
        refuse_distributed(model)
        refuse_several_processes()
        if not 0 <= weight_decay < math.inf:
            raise ValueError(f"weight_decay is finite and not negative; got {weight_decay}.")
        self.settings = Settings(
            inverse=inverse_of(inverse),
            fisher=fisher_of(fisher),
            damping=AdaptiveDamping() if damping is None else damping,
            gamma=AdaptiveGamma() if gamma is None else gamma,
            step_size=QuadraticModel(bounded=True, memory=LongMemory())
            if step_size is None
            else step_size,
            acceptance=ACCEPT_ALL if acceptance is None else acceptance,
            statistics_fraction=statistics_fraction,
            fisher_fraction=fisher_fraction,
            inverse_interval=inverse_interval,
            inverse_lag=inverse_lag,
            clip=clip,
        )
        if other not in get_args(Other):
            raise ValueError(f"KFAC's other is one of {get_args(Other)}; got {other!r}.")
        self.model = model
        self.objective = objective_of(loss)
        self._other: Other = other
        own = self._own_model
        if blocks is not None and not isinstance(blocks, Blocks):
            raise TypeError(
                f"KFAC's blocks is a kronfac.Blocks, such as Blocks(dense_limit=512); got {blocks!r}."
            )
        self._blocks = Blocks() if blocks is None else blocks
        found = find_units(own, other, self._blocks)
        self.network = Network(
            own, found.units, found.sites, self.objective, Buffers(own), self._blocks
        )
        parameters = self.network.parameters
        super().__init__(parameters, {"weight_decay": weight_decay})
        self._recorder = StandingRecorder(model, self.objective, parameters, self.network.buffers)
        weakref.finalize(self, remove_hooks, self._recorder.handles)
        self._check = GradientCheck()
        self._verbose = verbose
        device = parameters[0].device
        self._state = saving.initial_state(self.settings, weight_decay, device)
        self.report: StepReport | None = None
        """What the last step did; None before the first."""

    _step_supports_amp_scaling = True
    """So that `GradScaler.step` says by what it has scaled the loss."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Without a closure it goes by the gradients in the parameters, and by the calls of the model and the
        loss that they are of: `loss.backward(); optimizer.step()`. If the last step turns out to have made
        things worse, it is rolled back, and this gradient is not used.

        With a closure, that computes loss and gradients on the mini-batch, as for L-BFGS, and is called
        again after a rollback; `step` returns what it returned.

        From a loss or a gradient that is not finite no step is taken: parameters and state stay as they
        were, and `report.refused` says so.
        """
        refuse_several_processes()  # a group may have been made since
        try:
            with full_precision(self.network.device) as callers, self._recorder.paused():
                return self._step(closure, callers)
        finally:
            self._recorder.step()

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
        report = self._commit(evaluation, outcome, watch)
        if validation is not None:
            events = () if validation.event is None else (validation.event,)
            report = replace(report, next_rho=validation.rho, events=events + report.events)
        self.report = report
        return evaluation.returned

    def closure(
        self, x: Tensor | tuple[Tensor, ...], y: Tensor, *, chunk: int | None = None
    ) -> MiniBatchClosure:
        """The closure for one mini-batch, gone through in micro-batches of `chunk` examples.

        Beyond rounding the step does not depend on `chunk`; memory does.
        """
        return MiniBatchClosure(self.model, self.objective, x, y, chunk)

    def plan(self, example: Any, targets: Any = None) -> Plan:
        """What becomes of every parameter, and what a step takes: see `kronfac.plan`."""
        with (
            untouched(self.network),
            self._recorder.paused(),
            full_precision(self.network.device) as callers,
        ):
            batch = record_example(self.model, self.network, example, targets, callers)
            return self._plan(self.network, batch)

    def _plan(self, network: Network, batch: Batch) -> Plan:
        with untouched(network):
            weight_decay = float(self.param_groups[0]["weight_decay"])
            return make_plan(network, batch, self.settings, weight_decay)

    def _evaluate_loop(self) -> Evaluation | None:
        """What a loop without a closure has computed; None if there is nothing to take a step from."""
        scaling = Scaling.of(self)
        evaluation = evaluate_loop(
            self._recorder,
            self.network,
            weight_decay=float(self.param_groups[0]["weight_decay"]),
            inverse=self.settings.inverse,
            scaling=scaling,
        )
        if evaluation is None:
            return None
        if not evaluation.comparable():
            self._check.warn_of_unseen_loss()
        if self._recorder.watch.added_to_old:
            self._check.warn_of_old_gradients()
            return evaluation
        with self.network.buffers.preserved():
            return self._check(evaluation, self._state.iteration + 1, scaling.unscaled)

    def _evaluate(self, closure: Callable[[], Any], callers: Context) -> Evaluation:
        evaluation = evaluate(
            closure,
            self.model,
            self.network,
            weight_decay=float(self.param_groups[0]["weight_decay"]),
            inverse=self.settings.inverse,
            callers=callers,
        )
        with self.network.buffers.preserved():
            return self._check(evaluation, self._state.iteration + 1)

    def _forget_gradients(self) -> None:
        """Drop all gradients, so that a closure does not add to them."""
        for p in self.network.parameters:
            p.grad = None

    def _suspects(self, evaluation: Evaluation, outcome: Transition | RefusedError) -> bool:
        """Whether the loss on this mini-batch calls for a validation of the last step out of turn."""
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
            if rejected.kept is not None:
                evaluation.network.place(rejected.kept.theta)
            else:
                evaluation.network.move(rejected.delta, -1.0)
        self._state = validation.state
        return validation, outlier

    def _compute(
        self, evaluation: Evaluation, watch: Stopwatch, outlier: bool = False
    ) -> Transition | RefusedError:
        """The step from this mini-batch, or why there is none."""
        with watch("gradient"):
            point = Point.of(evaluation)
        try:
            with evaluation.network.buffers.preserved():
                return compute_step(self.settings, point, self._state, watch, outlier=outlier)
        except RefusedError as refusal:
            return refusal

    def _commit(
        self, evaluation: Evaluation, outcome: Transition | RefusedError, watch: Stopwatch
    ) -> StepReport:
        """Take the step: all or nothing."""
        if isinstance(outcome, RefusedError):
            return self._refusal(evaluation, watch, outcome)
        with watch("commit"):
            self.network = evaluation.network
            self.network.learned.compared = True
            self.network.move(outcome.delta)
            self._become(outcome.state)
            # Not before: nobody would want that of a step that is not taken.
            if outcome.state.refresh is not None:
                outcome.state.refresh.outcomes.begin()
        return outcome.report

    def _become(self, state: State) -> None:
        """Replace the state; a refresh under way that the new one does not go on with is given up."""
        under_way, self._state = self._state.refresh, state
        if under_way is not None and under_way is not state.refresh:
            under_way.outcomes.give_up()

    def _refusal(
        self, evaluation: Evaluation, watch: Stopwatch, refusal: RefusedError
    ) -> StepReport:
        gamma = self._state.gamma
        return StepReport(
            iteration=self._state.iteration + 1,
            loss=float(evaluation.returned_loss),
            lambda_=self._state.damping.lambda_,
            gamma=math.nan if gamma is None else gamma.gamma,
            examples=evaluation.batch.examples,
            seconds=watch.seconds,
            events=(Event(EventKind.REFUSED, str(refusal)),),
        )

    def _skip(self, evaluation: Evaluation, watch: Stopwatch, validation: Validation) -> StepReport:
        """A mini-batch that has rejected the last step, whose gradient is not used."""
        assert validation.event is not None
        skipped = self._refusal(evaluation, watch, RefusedError())
        return replace(skipped, next_rho=validation.rho, events=(validation.event,))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, and what was recorded of the passes that they came from."""
        super().zero_grad(set_to_none)
        self._recorder.forget()

    def close(self) -> None:
        """Remove K-FAC's hooks from the model and the loss; steps need a closure from then on."""
        remove_hooks(self._recorder.handles)
        self._recorder.forget()

    @property
    def _own_model(self) -> nn.Module:
        """The model for K-FAC's own passes: what `torch.compile` wrapped, where hooks still fire."""
        inner = getattr(self.model, "_orig_mod", self.model)
        assert isinstance(inner, nn.Module)
        return inner

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for `torch.save`."""
        weight_decay = self.param_groups[0]["weight_decay"]
        return saving.save(self._state, self.network.units, self.settings, weight_decay)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit; a state that does not fit changes nothing.

        Raises:
            StateError: it is of another model, kind of inverse or version, or damaged.
        """
        loaded = saving.load(state_dict, self.network.units, self.settings)
        network = self.network.continued(loaded.order, loaded.state.curvature)
        self._become(loaded.state)
        self.network = network
        self.param_groups[0]["weight_decay"] = loaded.weight_decay

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, shallow, deep or pickled, is made from: it goes on as this one would."""
        settings = {field.name: getattr(self.settings, field.name) for field in fields(Settings)}
        (group,) = self.param_groups
        return {
            "model": self.model,
            "loss": self.objective.module,
            "settings": {
                **settings,
                "other": self._other,
                "blocks": self._blocks,
                "verbose": self._verbose,
                **self.defaults,
            },
            "state_dict": self.state_dict(),
            "group": {name: value for name, value in group.items() if name != "params"},
            "report": self.report,  # which a sampler knows as the one it looked at
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A module that holds its own optimizer is not complete yet when that is copied.
        if _complete(state["model"]):
            self._restore(state)
        else:
            self.__dict__["_saved"] = state

    if not TYPE_CHECKING:  # or every attribute would be thought to exist

        def __getattr__(self, name: str) -> Any:
            """Finish a copy when it is first used; only what an optimizer does not have leads here."""
            if "_saved" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")
            self._restore(self.__dict__.pop("_saved"))
            return getattr(self, name)

    def _restore(self, state: dict[str, Any]) -> None:
        KFAC.__init__(self, state["model"], state["loss"], **state["settings"])
        self.load_state_dict(state["state_dict"])
        self.param_groups[0].update(state["group"])
        self.report = state["report"]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """KFAC has one group, all trained layers of its model; a second one is refused."""
        if self.param_groups:
            raise ValueError(
                "KFAC trains the layers of the model that it was given; make a new one after "
                "changing the model."
            )
        super().add_param_group(ParameterGroup(param_group))


def _complete(module: nn.Module) -> bool:
    """Whether a module has been copied, all that is in it included."""
    modules = vars(module).get("_modules")
    return modules is not None and all(_complete(m) for m in modules.values() if m is not None)


def plan(
    model: nn.Module, loss: nn.Module, example: Any, targets: Any = None, **settings: Any
) -> Plan:
    """What `KFAC(model, loss, **settings)` would do, said before the first step.

    No step is taken, and parameters, gradients, buffers and random numbers stay as they are. The model is
    called with the example, and K-FAC's own passes run on a few of its examples.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> print(plan(model, nn.MSELoss(), torch.randn(64, 2)).engine)
        by hand

    Args:
        model: to be trained; what is frozen stays so.
        loss: as for `KFAC`.
        example: a mini-batch as the model is called with: a tensor, a tuple of arguments, or a dict of
            keyword arguments. Memory and cost are those for mini-batches of its size.
        targets: for the loss. None if the model computes its loss itself, or if they are not known: what
            the loss module says of the model's outputs is enough as a rule.
        **settings: those of `KFAC`.

    Raises:
        ExampleError: the model can't be called with the example, or the targets don't fit.
        UnsupportedModelError: `KFAC` would refuse the model.
    """
    return KFAC(model, loss, **settings).plan(example, targets)
