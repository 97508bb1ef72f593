"""KFAC, the optimizer, as torch.optim sees it; `step/` computes its steps."""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from kronfac.control import (
    AdaptiveDamping,
    AdaptiveGamma,
    AnyDampingRule,
    AnyGammaRule,
    QuadraticModel,
    StepRule,
)
from kronfac.curvature import ApproximateInverse, Fisher
from kronfac.distributed import averages_gradients, inner_model, refuse_distributed
from kronfac.errors import LoopError
from kronfac.groups import (
    Params,
    PerParameter,
    check_group,
    groups_of,
    likely_adams_rate,
    parameters_in,
)
from kronfac.model import Blocks, Network, find_network, remove_hooks
from kronfac.objective import is_loss, objective_of
from kronfac.record import MiniBatchClosure, Recorder
from kronfac.report import EventWarnings, StepReport, log_events
from kronfac.settings import Intervals, Settings, fisher_of, inverse_of, refuse_unknown
from kronfac.step.saving import MOMENTUM, extended_momentum, load, save, saved_groups
from kronfac.step.state import State, initial_state
from kronfac.step.take import take_step
from kronfac.warn import warn_once


class KFAC(torch.optim.Optimizer):
    """The paper's whole algorithm: no learning rate to find, no momentum to choose.

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
        loss: the module that the loop or the closure calls: `MSELoss`, `BCEWithLogitsLoss`,
            `CrossEntropyLoss`, `kronfac.Gaussian`, `kronfac.Bernoulli` or `kronfac.Categorical`. Always
            needed.
        params: what is trained: parameters of the model, or groups of them, such as
            `[{"params": weights, "weight_decay": 1e-2}, {"params": rest}]`, each with its own `lr` and
            `weight_decay` if it wants. Others stay as they are. None for all that are not frozen.
        lr: factor of each step, for schedules; α and μ are found for a factor of 1.
        weight_decay: η in h(θ) + η/2 ‖θ‖², biases included unless `params` has groups. The closure leaves
            it out.
        inverse: `"block_diagonal"`, `"block_tridiagonal"`, `"ekfac"`, or an `ApproximateInverse`, class
            or instance.
        fisher: `"sampled"`, `"empirical"`, `"exact"`, or an instance of `SampledFisher` and so on,
            for the seed, the number of samples and the moving average's decay.
        damping: λ, and when a step is rejected: `AdaptiveDamping()`, the default, which finds its own
            start, the paper's `LevenbergMarquardtRule(…)` or `FixedDamping(lambda_)`. Each takes
            `reject=None` to accept every step.
        gamma: γ: `AdaptiveGamma()`, the default, the paper's `GammaSearch(…)` or `FixedGamma(gamma)`.
        step_rule: (α, μ), momentum and a trust region: `QuadraticModel()`, the default, `RawStep(alpha)`,
            or `ConjugateGradients(…)` for a longer minimisation of M, as Hessian-free optimisation does.
        intervals: on how many examples, and how often, a step does its expensive parts; None for
            `Intervals()`.
        blocks: which curvature block a layer gets, by its kind and size, and whether layers that KFAC does
            not know are refused; None for `Blocks()`.

    Reference: Martens and Grosse, Optimizing Neural Networks with Kronecker-factored Approximate
    Curvature, 2015. `docs/deviations.md` lists the differences.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module | None = None,
        *,
        params: Params | None = None,
        lr: float | Tensor = 1.0,
        weight_decay: float = 0.0,
        inverse: str | ApproximateInverse | type[ApproximateInverse] = "block_diagonal",
        fisher: str | Fisher | type[Fisher] = "sampled",
        damping: AnyDampingRule | None = None,
        gamma: AnyGammaRule | None = None,
        step_rule: StepRule | None = None,
        intervals: Intervals | None = None,
        blocks: Blocks | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("KFAC", unknown)
        if not isinstance(model, nn.Module):
            raise TypeError(
                "KFAC needs the model itself, whose layers it looks at, not its parameters: "
                f"KFAC(model, loss); got a {type(model).__name__}."
            )
        if is_loss(model):
            raise TypeError(
                f"KFAC takes the model, then the loss: KFAC(model, loss); got a {type(model).__name__}, "
                f"which is a loss, as the model, and a {type(loss).__name__} as the loss."
            )
        if loss is None:
            raise TypeError(
                "KFAC needs the loss too, which says what the model's outputs predict; got none. Give it "
                "the module that the loop calls, as in KFAC(model, nn.CrossEntropyLoss()), or a likelihood "
                "such as kronfac.Categorical() if the model or a function computes the loss."
            )
        refuse_distributed(model)
        check_group({"lr": lr, "weight_decay": weight_decay})
        self.settings = Settings(
            inverse=inverse_of(inverse),
            fisher=fisher_of(fisher),
            damping=AdaptiveDamping() if damping is None else damping,
            gamma=AdaptiveGamma() if gamma is None else gamma,
            step_rule=QuadraticModel() if step_rule is None else step_rule,
            intervals=Intervals() if intervals is None else intervals,
        )
        self.model = model
        self.objective = objective_of(loss)
        if blocks is not None and not isinstance(blocks, Blocks):
            raise TypeError(
                f"KFAC's blocks is a kronfac.Blocks, such as Blocks(dense_limit=512); got {blocks!r}."
            )
        self._blocks = Blocks() if blocks is None else blocks
        groups = None if params is None else groups_of(params, self._own_model)
        chosen = None if groups is None else parameters_in(groups)
        self.network = self._network(chosen)
        super().__init__(
            groups or self.network.parameters, {"lr": lr, "weight_decay": weight_decay}
        )
        self._listen()
        self._wrapped = True if averages_gradients(model) else None
        self._state = self._initial_state()
        self._left_out, self._warned = self._trainable_elsewhere(), set[str]()
        self._check_rates()
        self._warn_of_events = EventWarnings()
        self._versions: list[tuple[int, int]] | None = None
        """Of the parameters after a step whose start is kept for a rollback."""
        self.report: StepReport | None = None
        """What the last step did; None before the first."""

    _step_supports_amp_scaling = True
    """Makes `GradScaler.step` pass on its scale instead of unscaling the gradients itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Without a closure it uses the gradients in the parameters, and the recorded calls of the model and
        the loss that they came from: `loss.backward(); optimizer.step()`. If the last step made the
        objective worse, it is rolled back, and this gradient is not used.

        A closure computes loss and gradients on the mini-batch, as for L-BFGS. It is called again after a
        rollback, and `step` returns its value. A closure that adds to the gradients of earlier
        micro-batches, as Lightning's does, ends a loop without a closure.

        From a loss or a gradient that is not finite no step is taken: parameters and state stay as they
        were, and `report.refused` says so. With a learning rate of 0 in all groups nothing moves, and
        statistics are updated. Without a recorded pass nothing is done then: torch's distributed
        checkpoints take such a step to create the state of a new optimizer.
        """
        _refuse_call(closure)
        self._check_rates()
        moves = any(float(group["lr"]) for group in self.param_groups)
        if closure is None and not moves and not self._recorder.since.forwards:
            self._show_momentum(anyway=True)
            return None
        before = self.report
        changed = self._versions not in (None, self.network.versions)
        try:
            result = take_step(self, closure, changed)
        finally:
            pending = self._state.acceptance.pending
            kept = pending is not None and pending.kept is not None
            self._versions = self.network.versions if kept else None
        if self.report is not None and self.report is not before:
            self._warn_of_events(self.report)
            log_events(self.report)
        return result

    def closure(
        self, x: Tensor | tuple[Tensor, ...], y: Tensor, *, chunk: int | None = None
    ) -> MiniBatchClosure:
        """The closure for one mini-batch, gone through in micro-batches of `chunk` examples.

        `chunk` changes how much memory the step takes; the step itself only by rounding.
        """
        return MiniBatchClosure(self.model, self.objective, x, y, chunk)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, and the records of the passes that they came from."""
        if set_to_none:
            # Like torch's own, without its bookkeeping, which takes as long as a small layer.
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            super().zero_grad(set_to_none)
        self._recorder.forget()

    def close(self) -> None:
        """Remove K-FAC's hooks from the model and the loss; steps need a closure from then on."""
        remove_hooks(self._recorder.handles)
        self._recorder.forget()

    @property
    def _own_model(self) -> nn.Module:
        """The model for K-FAC's own passes: what `torch.compile` or DistributedDataParallel wrapped."""
        return inner_model(self.model)

    # --------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for `torch.save`.

        `"state"` shows the momentum buffer of each parameter and `"param_groups"` has the options of the
        groups, as for any optimizer of torch's. `"kfac"` has the whole state, from which K-FAC goes on.
        """
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        saved = self._saved_state()
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            replaced = post_hook(self, saved)
            saved = saved if replaced is None else replaced
        return saved

    def _saved_state(self) -> dict[str, Any]:
        """The state, before any hook for `state_dict`."""
        return {
            **saved_groups(self.param_groups, self.state),
            "kfac": save(self._state, self.network, self.settings),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit; a state that does not fit changes nothing.

        Raises:
            StateError: it is of another model, kind of inverse or version, or damaged.
        """
        if isinstance(state_dict, dict):
            state_dict = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = pre_hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        state, network, loaded = load(state_dict, self.param_groups, self.network, self.settings)
        self.network = network
        self._versions = None
        self.state.clear()
        self._become(state)
        if state.refresh is not None:
            state.refresh.begin()
        for group, options in zip(self.param_groups, loaded, strict=True):
            kept = group["params"]
            group.clear()
            group.update(copy.deepcopy(options), params=kept)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _become(self, state: State) -> None:
        """Replace the state, and show its momentum."""
        self._state = state
        self._show_momentum()

    def _show_momentum(self, anyway: bool = False) -> None:
        """Show the momentum buffer in `state`, where torch keeps the tensors of each parameter.

        It is for reading: K-FAC continues from its own state. Before the first step there is none; zeros
        are shown if `anyway`.
        """
        vector, parameters = self._state.step.momentum, self.network.parameters
        if vector is None and not self.state and not anyway:
            return
        zeros = map(torch.zeros_like, parameters)
        buffers = zeros if vector is None else self.network.split(vector)
        for p, buffer in zip(parameters, buffers, strict=True):
            self.state[p][MOMENTUM] = buffer

    def __getstate__(self) -> dict[str, Any]:
        """The content of a shallow, deep or pickled copy, which continues as this optimizer would."""
        settings = {field.name: getattr(self.settings, field.name) for field in fields(Settings)}
        return {
            "model": self.model,
            "loss": self.objective.module,
            "settings": {
                **settings,
                "blocks": self._blocks,
                **self.defaults,
            },
            "groups": [dict(group) for group in self.param_groups],
            "state_dict": self._saved_state(),
            "report": self.report,  # which a sampler knows as the one it looked at
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A module that holds its own optimizer is not complete yet when that is copied.
        if not _complete(state["model"]):
            self.__dict__["_copied_from"] = state
            return
        KFAC.__init__(
            self, state["model"], state["loss"], params=state["groups"], **state["settings"]
        )
        self.load_state_dict(state["state_dict"])
        self.report = state["report"]

    if not TYPE_CHECKING:  # or every attribute would be thought to exist

        def __getattr__(self, name: str) -> Any:
            """Finish a copy when it is first used; Python calls this for missing attributes only."""
            if "_copied_from" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}.")
            self.__setstate__(self.__dict__.pop("_copied_from"))
            return getattr(self, name)

    # -------------------------------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model, such as those of a layer that was frozen so far.

        The objective has another shape then: statistics and λ are computed again, from iteration 1 on. The
        momentum buffer stays, with zeros for the new parameters.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"A parameter group is a dict; got a {type(param_group).__name__}.")
        given, known = param_group.get("params"), self.network.parameters
        if isinstance(given, list) and {*parameters_in([param_group])} <= {*known}:
            # The constructor's: their units have been found.
            super().add_param_group(param_group)
            check_group(self.param_groups[-1], len(self.param_groups) - 1)
            return
        (group,) = groups_of([param_group], self._own_model)
        check_group({**self.defaults, **group}, len(self.param_groups))
        new = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        network = self._network([*parameters_in(self.param_groups), *new])
        super().add_param_group(group)
        momentum = extended_momentum(self.network, network, self._state.step.momentum)
        self.network = network
        self.close()
        self._listen()
        fresh = self._initial_state()
        self._become(replace(fresh, step=replace(fresh.step, momentum=momentum)))
        self._left_out = self._trainable_elsewhere()
        self._check_rates()

    def _check_rates(self) -> None:
        """Check the groups, and warn of a learning rate that is likely Adam's."""
        for number, group in enumerate(self.param_groups):
            check_group(group, number)
        if "rate" not in self._warned and (message := likely_adams_rate(self.param_groups)):
            warn_once(self._warned, "rate", message)

    def _listen(self) -> None:
        """Record what the model and the loss are called with from now on, for steps without a closure."""
        self._recorder = Recorder(
            self.model, self.objective, self.network.parameters, self.network.buffers
        )
        weakref.finalize(self, remove_hooks, self._recorder.handles)

    def _network(self, trained: Sequence[nn.Parameter] | None) -> Network:
        """The model with the units of these parameters; None for all that are not frozen."""
        return find_network(self._own_model, self.objective, self._blocks, trained)

    def _initial_state(self) -> State:
        weight_decay = PerParameter.of_groups(self.param_groups, "weight_decay")
        return initial_state(self.settings, weight_decay.least, self.network.device)

    def _trainable_elsewhere(self) -> set[int]:
        """The ids of parameters that could be trained and are in no group."""
        known = {id(p) for group in self.param_groups for p in group["params"]}
        return {id(p) for p in self.network.model.parameters() if p.requires_grad} - known


def _complete(module: nn.Module) -> bool:
    """Whether a module has been copied, all that is in it included."""
    modules = vars(module).get("_modules")
    return modules is not None and all(_complete(m) for m in modules.values() if m is not None)


def _refuse_call(closure: object) -> None:
    """Refuse an argument of `step` that is no closure, and a step without gradients.

    Raises:
        TypeError: `closure` can't be called.
        LoopError: `torch.inference_mode` is on.
    """
    if closure is not None and not callable(closure):
        raise TypeError(
            "KFAC.step() takes a closure that computes the loss, or nothing; got a "
            f"{type(closure).__name__}. Call loss.backward(), then step() with no argument."
        )
    if torch.is_inference_mode_enabled():
        raise LoopError(
            "KFAC.step() needs gradients, but it is called in torch.inference_mode(), in which there are "
            "none. Train outside of it; it is for evaluation."
        )
