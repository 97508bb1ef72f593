"""KFAC, the optimizer: evaluate, compute, commit.

`update.py` computes a step and touches nothing; here it is committed, all or nothing.
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
from kronfac.distributed import refuse_distributed, refuse_several_processes
from kronfac.errors import ClosureError, StateError
from kronfac.evaluated import Evaluated, evaluate
from kronfac.inverses import ApproximateInverse
from kronfac.iterate_average import updated_average
from kronfac.judgement import Judgement, judge, judges_next, suspicious
from kronfac.layers import find_layers
from kronfac.objective import objective_of
from kronfac.parameters import forget_gradients, move, place
from kronfac.point import Network, Point, RefusedError
from kronfac.precision import Context, full_precision
from kronfac.report import Event, StepReport, Stopwatch
from kronfac.settings import Settings, fisher_of, inverse_of
from kronfac.state import Kept, State
from kronfac.statistics import Fisher, Recorder
from kronfac.step_size import (
    AdaptiveDamping,
    AdaptiveGamma,
    DampingRule,
    GammaRule,
    LongMemory,
    QuadraticModel,
    StepRule,
)
from kronfac.update import Update


class KFAC(torch.optim.Optimizer):
    """The paper's whole algorithm: no learning rate, no momentum to choose.

    With g = ∇h(θ) on the mini-batch and F⁰ the Kronecker-factored Fisher, damped by γ:

        Δ = −F⁰⁻¹ g,   (α, μ) = argmin M(αΔ + μδ₀),   θ ← θ + αΔ + μδ₀

    where M is the quadratic model with the exact Fisher, damped by λ, and δ₀ the previous update. Where
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
        damping: DampingRule | None = None,
        gamma: GammaRule | None = None,
        step_size: StepRule | None = None,
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
        lambda_ = self.settings.damping.lambda_
        # NaN is a λ that the first step will find.
        self._state = State(
            iteration=0,
            lambda_=math.nan if lambda_ is None else lambda_,
            gamma=math.nan
            if lambda_ is None
            else self.settings.gamma.initial(lambda_, weight_decay),
            generator=saving.seeded(self.settings.fisher.seed, parameters[0].device),
        )
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
        rule = self.settings.damping
        judging = judges_next(rule, self._state)
        judgement: Judgement | None = None
        odd = False
        while True:
            with watch("gradient"):
                evaluated = self._evaluate(closure, callers)
            network = evaluated.network
            if judging and judgement is None:
                with watch("reduction_ratio"):
                    evaluation, cases = evaluated.evaluation, evaluated.evaluation.batch.cases
                    loss = float(evaluation.returned)
                    odd = suspicious(network, rule, self._state, cases, loss)
                    judgement = judge(network, rule, evaluation, self._state)
                if judgement is not None and self._accept(network, judgement):
                    odd = False  # it was the step
                    forget_gradients(self.layers)
                    continue  # at the parameters from before the step that was taken back
            with watch("gradient"):
                point = evaluated.point()
            report = self._advance(network, point, watch, judging, odd)
            if report is None:
                judging = True  # out of turn: was it the last step, or is it these rows?
                forget_gradients(self.layers)
                continue
            break
        if judgement is not None:
            events = () if judgement.event is None else (judgement.event,)
            report = replace(report, next_rho=judgement.rho, events=events + report.events)
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

    def _accept(self, network: Network, judgement: Judgement) -> bool:
        """Move λ; whether the last step was taken back."""
        delta, last = self._state.previous_delta, self._state.last
        assert delta is not None
        assert last is not None
        if judgement.event is not None:
            if last.kept is not None:
                place(network.layers, last.kept.theta)
            else:
                move(network.layers, tuple(V.neg() for V in delta))
        self._state = judgement.state
        return judgement.event is not None

    def _advance(
        self, network: Network, point: Point, watch: Stopwatch, judged: bool, odd: bool
    ) -> StepReport | None:
        """Compute a step and take it: all or nothing. None if the last step has to be judged first.

        From `odd` rows it is a step that has to be judged by the next ones.
        """
        rule, cases = self.settings.damping, point.batch.cases
        try:
            transition = Update(network, self.settings)(point, self._state, watch)
        except RefusedError as refusal:
            loss = float(point.returned)
            if not judged and suspicious(network, rule, self._state, cases, loss):
                return None
            return self._refusal(point, watch, refusal)
        # Only here, where the host knows the loss without another synchronisation.
        last = transition.state.last
        assert last is not None
        if not judged and suspicious(network, rule, self._state, cases, last.loss, last.penalty):
            return None
        with watch("commit"):
            average, start = updated_average(network, self.settings.step_size, self._state)
            state = replace(transition.state, average=average, average_start=start)
            if odd or transition.far or judges_next(rule, state):
                assert state.last is not None
                kept = Kept(network.theta(), self._state.momentum)
                state = replace(state, last=replace(state.last, kept=kept))
            self.layers, self._chain_known = list(network.layers), True
            move(network.layers, transition.delta)
            self._become(state)
            # Not before: nobody would want that of a step that is not taken.
            if state.refresh is not None:
                state.refresh.outcomes.begin()
        return transition.report

    def _become(self, state: State) -> None:
        """With a state that does not go on with it, a refresh under way is not wanted any more."""
        under_way, self._state = self._state.refresh, state
        if under_way is not None and under_way is not state.refresh:
            under_way.outcomes.give_up()

    def _refusal(self, point: Point, watch: Stopwatch, refusal: RefusedError) -> StepReport:
        return StepReport(
            iteration=self._state.iteration + 1,
            loss=float(point.returned),
            lambda_=self._state.lambda_,
            gamma=self._state.gamma,
            cases=point.batch.cases,
            seconds=watch.seconds,
            events=(Event("refused", str(refusal)),),
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
            "kfac": saving.save(self._state, self.layers, self.settings.inverse),
            "weight_decay": self.param_groups[0]["weight_decay"],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit; a state that does not fit changes nothing."""
        for entry in ("kfac", "weight_decay"):
            if not isinstance(state_dict, dict) or entry not in state_dict:
                raise StateError(
                    f"This is not the state_dict of a KFAC: it has no entry {entry!r}."
                )
        state, layers = saving.load(state_dict["kfac"], self.layers, self.settings.inverse)
        rule = self.settings.damping
        if math.isnan(state.lambda_) and not rule.searches:
            # Saved before its first step, which was to find λ.
            assert rule.lambda_ is not None
            gamma = self.settings.gamma.initial(rule.lambda_, float(state_dict["weight_decay"]))
            state = replace(state, lambda_=rule.lambda_, gamma=gamma)
        if not self.settings.inverse_lag:
            state = replace(state, refresh=None)  # here every refresh is made at once
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
