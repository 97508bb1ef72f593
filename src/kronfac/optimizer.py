"""KFAC, the optimizer, as torch.optim sees it; `transitions.py` takes its steps."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from kronfac import state as saving
from kronfac.closure import MiniBatchClosure
from kronfac.conditions import Conditions
from kronfac.control import (
    Acceptance,
    AdaptiveDamping,
    AdaptiveGamma,
    AnyDampingRule,
    AnyGammaRule,
    GeodesicSteps,
    LongMemory,
    QuadraticModel,
    StepRule,
)
from kronfac.curvature import ApproximateInverse, Fisher
from kronfac.distributed import (
    averages_gradients,
    fully_sharded,
    inner_model,
    refuse_distributed,
)
from kronfac.gradient_check import GradientCheck
from kronfac.groups import (
    Params,
    PerParameter,
    RateWarning,
    check_group,
    groups_of,
    parameters_in,
)
from kronfac.loop import refuse_call
from kronfac.network import (
    Blocks,
    Buffers,
    Network,
    Other,
    StandingRecorder,
    find_units,
    remove_hooks,
)
from kronfac.network.sharded import Shards
from kronfac.objective import UnknownLoss, is_loss, objective_of
from kronfac.parameters_first import Awaited, LateOptimizer
from kronfac.planning import Plan, World, record_example, untouched
from kronfac.precision import full_precision
from kronfac.report import EventWarnings, StepReport
from kronfac.settings import Settings, fisher_of, inverse_of
from kronfac.state import State
from kronfac.state_groups import extended_momentum

ACCEPTANCE = Acceptance()
"""KFAC's own rule for rejecting steps."""
ACCEPT_ALL = Acceptance(rejection=None, suspicion=None)


class KFAC(LateOptimizer):
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
        inverse: `"block_diagonal"`, `"block_tridiagonal"`, `"ekfac"`, or an `ApproximateInverse`, class
            or instance.
        weight_decay: η in h(θ) + η/2 ‖θ‖², biases included unless `params` has groups. The closure leaves
            it out.
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
        inverse_share: the share of the processes that hold the inverse of a unit, if there are several: 1
            for all, so that only refreshes send something; 1/W or less for one of W, which saves memory,
            and then directions are sent in every step.
        clip: a trust region: the step is scaled so that δᵀFδ ≤ clip²; None for none.
        average_decay: ξ of an average of the iterates, θ̄ ← ξ θ̄ + (1 − ξ) θ, such as 0.99: `eval()` puts it
            into the model, `train()` takes it out again. None for no average.
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
        loss: nn.Module | None = None,
        *,
        params: Params | None = None,
        lr: float | Tensor = 1.0,
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
        inverse_share: float = 1.0,
        clip: float | None = None,
        average_decay: float | None = None,
        other: Other = "diagonal",
        blocks: Blocks | None = None,
        verbose: bool = False,
    ) -> None:
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
        refuse_distributed(model, shards=True)
        check_group({"lr": lr, "weight_decay": weight_decay})
        self.settings = Settings(
            inverse=inverse_of(inverse),
            fisher=fisher_of(fisher),
            damping=AdaptiveDamping() if damping is None else damping,
            gamma=AdaptiveGamma() if gamma is None else gamma,
            step_size=QuadraticModel(bounded=True, memory=LongMemory(), whole=GeodesicSteps())
            if step_size is None
            else step_size,
            acceptance=ACCEPT_ALL if acceptance is None else acceptance,
            statistics_fraction=statistics_fraction,
            fisher_fraction=fisher_fraction,
            inverse_interval=inverse_interval,
            inverse_lag=inverse_lag,
            inverse_share=inverse_share,
            clip=clip,
            average_decay=average_decay,
        )
        if other not in get_args(Other):
            raise ValueError(f"KFAC's other is one of {get_args(Other)}; got {other!r}.")
        self.model = model
        self.objective = objective_of(loss)
        self._other: Other = other
        if blocks is not None and not isinstance(blocks, Blocks):
            raise TypeError(
                f"KFAC's blocks is a kronfac.Blocks, such as Blocks(dense_limit=512); got {blocks!r}."
            )
        self._blocks = Blocks() if blocks is None else blocks
        self._shards = Shards(self._own_model) if fully_sharded(self._own_model) else None
        groups = None if params is None else groups_of(params, self._own_model)
        chosen = None if groups is None else parameters_in(groups)
        self.network = self._network(chosen)
        super().__init__(groups or self.network.given, {"lr": lr, "weight_decay": weight_decay})
        self._listen()
        self._verbose = verbose
        self._wrapped = True if averages_gradients(model) else None
        self._state = self._initial_state()
        self._warn_of_rate = vars(self).get("_warn_of_rate") or RateWarning()
        self._warn_of_rate(self.param_groups)
        self._warn_of_events = EventWarnings()
        self._conditions = Conditions()
        self._check = GradientCheck(self._left_out())
        self.report: StepReport | None = None
        """What the last step did; None before the first."""

    @classmethod
    def for_parameters(
        cls, params: Params, loss: nn.Module | None = None, *, lr: float | Tensor, **settings: Any
    ) -> "KFAC":
        """An optimizer for frameworks that make one with parameters, before it is known what calls them.

        The model is the first module that is called, with gradients enabled, and holds all of them. Until
        then there is no state: `state_dict`, `load_state_dict`, `zero_grad`, groups and schedulers work,
        and there is no `model` or `report`.

        Example:
            >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
            >>> optimizer = KFAC.for_parameters(model.parameters(), nn.MSELoss(), lr=1.0)

        Args:
            params: as for any optimizer of torch's: parameters, or groups of them.
            loss: as for `KFAC`. None if a closure calls it, or the model in its `forward`, where it is
                seen.
            lr: 1 as a rule. It has no default, as frameworks fill in one that is Adam's.
            **settings: those of `KFAC`.
        """
        loss = UnknownLoss() if loss is None else loss
        given = {"lr": lr, "weight_decay": 0.0, **settings}
        # What is wrong with the settings is better said here than in the first forward pass.
        cls(nn.Linear(1, 1), loss, **{**given, "lr": 1.0, "verbose": False}).close()
        check_group(given)
        optimizer = cls.__new__(cls)
        optimizer._await_model(params, Awaited(loss, given))
        return optimizer

    _step_supports_amp_scaling = True
    """So that `GradScaler.step` says by what it has scaled the loss."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Without a closure it goes by the gradients in the parameters, and by the calls of the model and the
        loss that they are of: `loss.backward(); optimizer.step()`. If the last step turns out to have made
        things worse, it is rolled back, and this gradient is not used.

        With a closure, that computes loss and gradients on the mini-batch, as for L-BFGS, and is called
        again after a rollback; `step` returns what it returned. If it adds to the gradients of
        micro-batches before it, as with Lightning, it is the end of a loop without a closure.

        From a loss or a gradient that is not finite no step is taken: parameters and state stay as they
        were, and `report.refused` says so. With a learning rate of 0 in all groups nothing moves, and
        statistics are updated. Then, as when torch's distributed checkpoints want a new optimizer to have
        its state, there need not be anything to take a step from: nothing is done.
        """
        refuse_call(closure)
        for number, group in enumerate(self.param_groups):
            check_group(group, number)
        self._warn_of_rate(self.param_groups)
        if not self._need_model(closure):
            return None
        self._refuse_in_eval()
        if closure is None and not self._rates and not self._recorder.forwards:
            self._publish_momentum(anyway=True)
            return None
        return self._take_step(closure)

    def closure(
        self, x: Tensor | tuple[Tensor, ...], y: Tensor, *, chunk: int | None = None
    ) -> MiniBatchClosure:
        """The closure for one mini-batch, gone through in micro-batches of `chunk` examples.

        Beyond rounding the step does not depend on `chunk`; memory does.
        """
        return MiniBatchClosure(self.model, self.objective, x, y, chunk)

    def plan(self, example: Any, targets: Any = None, *, world: int | World | None = None) -> Plan:
        """What becomes of every parameter, and what a step takes: see `kronfac.plan`."""
        with (
            untouched(self.network),
            self._recorder.paused(),
            full_precision(self.network.device) as callers,
        ):
            model = self.model
            if self._shards is not None:
                self._shards.pull()
                model = self.network.model
            batch = record_example(model, self.network, example, targets, callers)
            if isinstance(world, int):
                world = World(world, inverse_share=self.settings.inverse_share)
            return self._plan(self.network, batch, world)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, and what was recorded of the passes that they came from."""
        if set_to_none:
            # As torch's own does, without its administration, which takes as long as a small layer.
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad = None
        else:
            super().zero_grad(set_to_none)
        if self._awaited is None:
            self._recorder.forget()

    def close(self) -> None:
        """Remove K-FAC's hooks from the model and the loss; steps need a closure from then on."""
        if self._awaited is not None:
            self._watch.close()
            return
        remove_hooks(self._recorder.handles)
        self._recorder.others.stop()
        self._recorder.forget()

    @property
    def _own_model(self) -> nn.Module:
        """The model for K-FAC's own passes: what `torch.compile` or DistributedDataParallel wrapped."""
        return inner_model(self.model)

    # --------------------------------------------------------------------------------------- state

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, shallow, deep or pickled, is made from: it goes on as this one would."""
        if self._awaited is not None:
            return {
                "awaited": self._awaited,
                "groups": [dict(group) for group in self.param_groups],
            }
        settings = {field.name: getattr(self.settings, field.name) for field in fields(Settings)}
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
            "groups": [dict(group) for group in self.param_groups],
            "state_dict": self._saved_state(),
            "report": self.report,  # which a sampler knows as the one it looked at
        }

    def _restore(self, state: dict[str, Any]) -> None:
        groups = [dict(group) for group in state["groups"]]
        if "awaited" in state:
            self._await_model(groups, state["awaited"])
            return
        KFAC.__init__(self, state["model"], state["loss"], params=groups, **state["settings"])
        self.load_state_dict(state["state_dict"])
        self.report = state["report"]

    def _become_complete(self, model: nn.Module, awaited: Awaited) -> None:
        KFAC.__init__(self, model, awaited.loss, params=self.param_groups, **awaited.settings)

    # -------------------------------------------------------------------------------------- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Train further parameters of the model, such as those of a layer that was frozen so far.

        The objective has another shape then: statistics and λ are found anew, from iteration 1 on. The
        momentum buffer stays, with zeros for the new parameters.
        """
        if not isinstance(param_group, dict):
            raise TypeError(f"A parameter group is a dict; got a {type(param_group).__name__}.")
        if "_check" not in vars(self):  # the constructor's, which finds the units itself
            super().add_param_group(param_group)
            check_group(self.param_groups[-1], len(self.param_groups) - 1)
            return
        self.train()
        (group,) = groups_of([param_group], self._own_model)
        check_group({**self.defaults, **group}, len(self.param_groups))
        new = [item[1] if isinstance(item, tuple) else item for item in group["params"]]
        known = [p for old in self.param_groups for p in old["params"]]
        network = self._network([*known, *new])
        super().add_param_group(group)
        momentum = extended_momentum(self.network, network, self._state.step.momentum)
        self.network = network
        self.close()
        self._listen()
        fresh = self._initial_state()
        self._become(replace(fresh, step=replace(fresh.step, momentum=momentum)))
        self._check = GradientCheck(self._left_out())
        self._warn_of_rate(self.param_groups)

    def _listen(self) -> None:
        """Record what the model and the loss are called with from now on, for steps without a closure."""
        self._recorder = StandingRecorder(
            self.model, self.objective, self.network.given, self.network.buffers
        )
        weakref.finalize(self, remove_hooks, self._recorder.handles)

    def _network(self, trained: Sequence[nn.Parameter] | None) -> Network:
        """The model with the units of these parameters; None for all that are not frozen."""
        own, shards = self._own_model, self._shards
        if shards is not None:
            own = shards.model
            trained = None if trained is None else [shards.whole(p) for p in trained]
        found = find_units(own, self._other, self._blocks, trained)
        network = Network(own, found.units, found.sites, self.objective, Buffers(own), self._blocks)
        return replace(network, shards=shards)

    def _initial_state(self) -> State:
        weight_decay = PerParameter.of_groups(self._own_groups, "weight_decay")
        return saving.initial_state(self.settings, weight_decay.least, self.network.device)

    def _left_out(self) -> list[nn.Parameter]:
        """Parameters that could be trained and are in no group."""
        known = {id(p) for group in self.param_groups for p in group["params"]}
        return [p for p in self._own_model.parameters() if p.requires_grad and id(p) not in known]


def plan(
    model: nn.Module,
    loss: nn.Module,
    example: Any,
    targets: Any = None,
    *,
    world: int | World | None = None,
    bandwidth: float | None = None,
    **settings: Any,
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
            the loss module says of the model's outputs is enough as a rule. They are not used on the
            `meta` device, on which models can be planned for that no memory holds.
        world: several processes, as their number or as a `World`: `plan.world` then says what each of them
            computes, sends and holds.
        bandwidth: bytes per second that a process sends to others, for `world`.
        **settings: those of `KFAC`.

    Raises:
        ValueError: a bandwidth without a world, or numbers that make none.
        ExampleError: the model can't be called with the example, or the targets don't fit.
        UnsupportedModelError: `KFAC` would refuse the model.
    """
    if bandwidth is not None:
        if world is None:
            raise ValueError(
                f"kronfac.plan takes a bandwidth for several processes; got bandwidth={bandwidth} and no "
                "world. Pass world=64, or whatever their number is."
            )
        if isinstance(world, int):
            world = World(world, inverse_share=settings.get("inverse_share", 1.0))
        world = replace(world, bandwidth=bandwidth)
    optimizer = KFAC(model, loss, **settings)
    try:
        return optimizer.plan(example, targets, world=world)
    finally:
        optimizer.close()
