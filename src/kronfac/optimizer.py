"""KFAC, the optimizer: evaluate, compute, commit.

`validation.py` and `step.py` compute and touch nothing; here the result is committed, all or nothing.
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

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
from kronfac.distributed import refuse_distributed, refuse_several_processes
from kronfac.errors import ClosureError, StateError
from kronfac.evaluated import Evaluated, evaluate
from kronfac.inverses import ApproximateInverse
from kronfac.layers import find_layers
from kronfac.objective import objective_of
from kronfac.parameters import forget_gradients, move, place
from kronfac.point import Network, RefusedError
from kronfac.precision import Context, full_precision
from kronfac.report import Event, EventKind, StepReport, Stopwatch
from kronfac.settings import Settings, fisher_of, inverse_of
from kronfac.state import State
from kronfac.statistics import Fisher, Recorder
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
        model: called by the closure; its nn.Linear layers are trained.
        loss: the module that the closure calls: `MSELoss`, `BCEWithLogitsLoss`, `CrossEntropyLoss`,
            `kronfac.Gaussian`, `kronfac.Bernoulli` or `kronfac.Categorical`.
        inverse: `"block_diagonal"`, `"block_tridiagonal"`, or an `ApproximateInverse`, class or
            instance.
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
            1/8, or 250 rows where that is more.
        fisher_fraction: τ₂, the share that the exact-Fisher products are taken on; None for 1/4, or 250
            rows where that is more.
        inverse_interval: T₃, iterations from one refresh of the inverse to the next; None for a quarter
            of the iterations so far, up to 20.
        inverse_lag: iterations from the start of a refresh to its use; where it is not 0 the inverse is
            computed in the background, beside the steps in between. Not in the first iterations.

    Reference: Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate
    Curvature, 2015. Where this differs from it: `docs/deviations.md`.
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
        )
        self.model = model
        self.objective = objective_of(loss)
        self.layers = find_layers(self._own_model)
        self._chain_known = not self.settings.inverse.needs_neighbours
        parameters = [p for layer in self.layers for p in layer.parameters()]
        super().__init__(parameters, {"weight_decay": weight_decay})
        self._recorder = Recorder(model, self.objective)
        device = parameters[0].device
        self._state = saving.initial_state(self.settings, weight_decay, device)
        self.report: StepReport | None = None
        """What the last step did; None before the first."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; the closure computes loss and gradients on the mini-batch, as for L-BFGS.

        Returns what the closure returned. From a loss or a gradient that is not finite no step is
        taken: parameters and state stay as they were, and `report.refused` says so.
        """
        if closure is None:
            raise ClosureError(
                "KFAC.step needs a closure that computes the loss and its gradients, as L-BFGS does; "
                "KFAC.closure(x, y) makes one."
            )
        refuse_several_processes()  # a group may have been made since
        with full_precision(self.layers[0].parameters()[0].device) as callers:
            return self._step(closure, callers)

    def _step(self, closure: Callable[[], Any], callers: Context) -> Any:
        watch = Stopwatch()
        with watch("gradient"):
            evaluated = self._evaluate(closure, callers)
        # The loss of a step that is computed already tells, without another synchronisation, whether the
        # step before it has to be validated out of turn.
        validates = in_turn(self.settings, self._state)
        outcome = None if validates else self._compute(evaluated, watch)
        validation, outlier = None, False
        if outcome is None or self._suspects(evaluated, outcome):
            outcome = None
            with watch("reduction_ratio"):
                validation, outlier = self._validate(evaluated)
            if validation is not None and validation.rejected is not None:
                forget_gradients(self.layers)
                with watch("gradient"):
                    evaluated = self._evaluate(closure, callers)
            outcome = self._compute(evaluated, watch, outlier)
        report = self._commit(evaluated, outcome, watch)
        if validation is not None:
            events = () if validation.event is None else (validation.event,)
            report = replace(report, next_rho=validation.rho, events=events + report.events)
        self.report = report
        return evaluated.returned

    def closure(
        self, x: Tensor | tuple[Tensor, ...], y: Tensor, *, chunk: int | None = None
    ) -> MiniBatchClosure:
        """The closure for one mini-batch, gone through in micro-batches of `chunk` rows.

        Beyond rounding the step does not depend on `chunk`; memory does.
        """
        return MiniBatchClosure(
            self.model,
            self.objective,
            self.layers,
            x,
            y,
            chunk,
            self.settings.inverse,
            float(self.param_groups[0]["weight_decay"]),
        )

    def _evaluate(self, closure: Callable[[], Any], callers: Context) -> Evaluated:
        return evaluate(
            closure,
            self._recorder,
            Network(self._own_model, self.layers, self.objective),
            weight_decay=float(self.param_groups[0]["weight_decay"]),
            inverse=self.settings.inverse,
            ordered=self._chain_known,
            callers=callers,
        )

    def _suspects(self, evaluated: Evaluated, outcome: Transition | RefusedError) -> bool:
        """Whether the loss on this mini-batch calls for a validation of the last step out of turn."""
        if isinstance(outcome, RefusedError):
            loss, penalty = float(evaluated.evaluation.returned), None
        else:
            pending = outcome.state.acceptance.pending
            assert pending is not None
            loss, penalty = pending.loss, pending.penalty
        network, evaluation = evaluated.network, evaluated.evaluation
        return suspects(network, self.settings, evaluation, self._state, loss, penalty)

    def _validate(self, evaluated: Evaluated) -> tuple[Validation | None, bool]:
        """Validate the last step on this mini-batch, and commit what that says; roll back a rejected step.

        Also whether the mini-batch itself is an outlier, so that a step from it has to be validated too.
        """
        network, evaluation = evaluated.network, evaluated.evaluation
        loss = float(evaluation.returned)
        outlier = suspects(network, self.settings, evaluation, self._state, loss)
        validation = validate(network, self.settings, evaluation, self._state)
        if validation is None:
            return None, outlier
        if (rejected := validation.rejected) is not None:
            outlier = False  # it was the step
            if rejected.kept is not None:
                place(network.layers, rejected.kept.theta)
            else:
                move(network.layers, tuple(V.neg() for V in rejected.delta))
        self._state = validation.state
        return validation, outlier

    def _compute(
        self, evaluated: Evaluated, watch: Stopwatch, outlier: bool = False
    ) -> Transition | RefusedError:
        """The step from this mini-batch, or why there is none."""
        with watch("gradient"):
            point = evaluated.point()
        try:
            return compute_step(
                evaluated.network, self.settings, point, self._state, watch, outlier=outlier
            )
        except RefusedError as refusal:
            return refusal

    def _commit(
        self, evaluated: Evaluated, outcome: Transition | RefusedError, watch: Stopwatch
    ) -> StepReport:
        """Take the step: all or nothing."""
        if isinstance(outcome, RefusedError):
            return self._refusal(evaluated, watch, outcome)
        network = evaluated.network
        with watch("commit"):
            self.layers, self._chain_known = list(network.layers), True
            move(network.layers, outcome.delta)
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

    def _refusal(self, evaluated: Evaluated, watch: Stopwatch, refusal: RefusedError) -> StepReport:
        gamma = self._state.gamma
        return StepReport(
            iteration=self._state.iteration + 1,
            loss=float(evaluated.evaluation.returned),
            lambda_=self._state.damping.lambda_,
            gamma=math.nan if gamma is None else gamma.gamma,
            examples=evaluated.evaluation.batch.cases,
            seconds=watch.seconds,
            events=(Event(EventKind.REFUSED, str(refusal)),),
        )

    @property
    def _own_model(self) -> nn.Module:
        """The model for K-FAC's own passes: what `torch.compile` wrapped, where hooks still fire."""
        inner = getattr(self.model, "_orig_mod", self.model)
        assert isinstance(inner, nn.Module)
        return inner

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for `torch.save`."""
        return {
            "kfac": saving.save(self._state, self.layers, self.settings),
            "weight_decay": self.param_groups[0]["weight_decay"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit; a state that does not fit changes nothing."""
        for entry in ("kfac", "weight_decay"):
            if not isinstance(state_dict, dict) or entry not in state_dict:
                raise StateError(
                    f"This is not the state_dict of a KFAC: it has no entry {entry!r}."
                )
        weight_decay = float(state_dict["weight_decay"])
        state, layers = saving.load(state_dict["kfac"], self.layers, self.settings, weight_decay)
        self._become(state)
        self.layers = layers
        self._chain_known = self._chain_known or state.iteration > 0
        self.param_groups[0]["weight_decay"] = state_dict["weight_decay"]

    def __deepcopy__(self, memo: dict[int, Any]) -> "KFAC":
        """With its model and loss, or theirs that are being copied too; it goes on as this one would."""
        model, loss = deepcopy((self.model, self.objective.module), memo)
        settings = {field.name: getattr(self.settings, field.name) for field in fields(Settings)}
        copy = type(self)(model, loss, **settings, **self.defaults)
        copy.load_state_dict(self.state_dict())
        others = {name: value for name, value in self.param_groups[0].items() if name != "params"}
        copy.param_groups[0].update(deepcopy(others, memo))
        copy.report = deepcopy(self.report, memo)  # which a sampler knows as the one it looked at
        memo[id(self)] = copy
        return copy

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """KFAC has one group, all trained layers of its model; a second one is refused."""
        if self.param_groups:
            raise ValueError(
                "KFAC trains the layers of the model that it was given; make a new one after "
                "changing the model."
            )
        super().add_param_group(param_group)
