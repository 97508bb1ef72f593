"""K-FAC in front of another optimizer: p.grad ← (A ⊗ G + damping)⁻¹ p.grad.

There is no rule for λ, no quadratic model and no validation: the other optimizer chooses the length of the
step. Statistics, inverses and the saved state are those of `KFAC`, with fixed rules.
"""

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.control import FixedDamping, FixedGamma, Measurement, RawStep
from kronfac.curvature import (
    ApproximateInverse,
    BlockDiagonalInverse,
    DampedInverse,
    EigenvalueCorrectedInverse,
    ExactTikhonov,
    Fisher,
)
from kronfac.distributed import World, averages_gradients, inner_model, refuse_distributed
from kronfac.errors import LoopError, RankError, StateError
from kronfac.groups import Params, PerParameter, groups_of, parameters_in
from kronfac.model import dot, find_network, remove_hooks
from kronfac.model.side_effects import full_precision
from kronfac.objective import objective_of
from kronfac.record import Recorder
from kronfac.settings import (
    AGE,
    FIRST_REFRESHES,
    LONGEST_INTERVAL,
    Intervals,
    Settings,
    fisher_of,
    inverse_of,
    refuse_unknown,
)
from kronfac.step import saving
from kronfac.step.collect import Scaling, evaluate_loop, join_ranks
from kronfac.step.evaluation import Evaluation
from kronfac.step.examples import choose_examples, update_curvature
from kronfac.step.inverses import Inverter
from kronfac.step.state import CurrentInverse, State, initial_state
from kronfac.warn import warn_once

Schedule = float | Callable[[int], float]
"""A number, or one for every count of steps taken."""

COUNTS = ("steps", "updated", "refreshed")
"""Steps in a saved state: all of them, with the last statistics, with the last inverse."""
EXACT: dict[str, ApproximateInverse] = {
    "block_diagonal": BlockDiagonalInverse(ExactTikhonov()),
    "ekfac": EigenvalueCorrectedInverse(ExactTikhonov()),
}
"""Inverses by name, with the damping added to the eigenvalues of A ⊗ G."""


class Preconditioner:
    """Replaces gradients by preconditioned ones, for any optimizer that comes after it.

        V ← (A ⊗ G + damping · I)⁻¹ V,

    V being the gradient of a layer's weight, with its bias as a further column.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        >>> loss_fn = nn.MSELoss()
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> preconditioner = Preconditioner(model, loss_fn, damping=0.01)
        >>> x = torch.randn(64, 2)
        >>> for _ in range(3):
        ...     sgd.zero_grad()
        ...     loss_fn(model(x), x.prod(dim=1, keepdim=True)).backward()
        ...     preconditioner.step()
        ...     sgd.step()

    Args:
        model: called by the loop.
        loss: the module that the loop calls, or a likelihood such as `kronfac.Categorical()` if the loop
            calls a function.
        damping: what is added to the eigenvalues; a new value counts from the next inverse on.
        inverse: `"block_diagonal"`, `"ekfac"`, or an `ApproximateInverse`, class or
            instance, which damps as it says.
        fisher: `"sampled"`, `"empirical"`, `"exact"`, or an instance.
        factor_interval: steps from one update of A and G to the next.
        inverse_interval: steps from one inverse to the next. Both intervals are at most a quarter of the
            steps so far, because the network changes fast at first.
        decay: ceiling of the moving averages' decay min(1 − 1/k, decay) at their k-th update.
        kl_clip: κ, a bound on the step: gradients are multiplied by ν = min(1, √(κ / (lr² Σ gᵀΔ))), g being
            the gradient before and Δ after. None for no bound.
        lr: the learning rate of the optimizer that comes after, for `kl_clip`.
        grad_scaler: the `GradScaler` that scales the loss, if there is one. Call its
            `unscale_(optimizer)` before `step`.
        params: parameters of the model to precondition; others keep their gradients. None for all that
            are not frozen.
        statistics_fraction: the share of the mini-batch that A and G are estimated on; None for 1/8, or
            250 examples if that is more.

    `damping` and `lr` may also be functions of the number of steps taken.

    On several processes of `torch.distributed`, statistics are those of all ranks, and all ranks have the
    same inverse. `step` preconditions what is in `p.grad`: average gradients before it, as
    DistributedDataParallel does, or after it.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        *,
        damping: Schedule = 1e-3,
        inverse: str | ApproximateInverse | type[ApproximateInverse] = "block_diagonal",
        fisher: str | Fisher | type[Fisher] = "sampled",
        factor_interval: int = 1,
        inverse_interval: int = LONGEST_INTERVAL,
        decay: float = 0.95,
        kl_clip: float | None = None,
        lr: Schedule | None = None,
        grad_scaler: Any = None,
        params: Params | None = None,
        statistics_fraction: float | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown("Preconditioner", unknown)
        if not isinstance(model, nn.Module):
            raise TypeError(
                "Preconditioner needs the model itself, whose layers it looks at, not its parameters: "
                f"Preconditioner(model, loss); got a {type(model).__name__}."
            )
        if kl_clip is not None and lr is None:
            raise ValueError(
                "Preconditioner's kl_clip bounds the step, which lr is a factor of: give lr too, the "
                "learning rate of the optimizer that comes after, such as "
                "lr=lambda step: sgd.param_groups[0]['lr']."
            )
        for name, count in (
            ("factor_interval", factor_interval),
            ("inverse_interval", inverse_interval),
        ):
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"Preconditioner's {name} is an integer from 1 on; got {count!r}.")
        refuse_distributed(model)
        self.damping, self.kl_clip, self.lr = damping, kl_clip, lr
        self.factor_interval, self.inverse_interval = factor_interval, inverse_interval
        self.steps = 0
        """Steps taken."""
        # The steps with the last statistics and the last inverse.
        self._updated = self._refreshed = 0
        chosen = fisher_of(fisher)
        if isinstance(inverse, str):
            inverse = EXACT.get(inverse, inverse)
        self.settings = Settings(
            inverse=inverse_of(inverse),
            fisher=replace(chosen, ema_decay=decay) if chosen.ema_decay is None else chosen,
            damping=FixedDamping(_scheduled(damping, 0), reject=None),
            gamma=FixedGamma(),
            step_rule=RawStep(1.0),
            intervals=Intervals(statistics_fraction, statistics_fraction),
        )
        self.model = model
        self._grad_scaler = grad_scaler
        self._wrapped = averages_gradients(model)
        own = inner_model(model)
        trained = None if params is None else parameters_in(groups_of(params, own))
        self.network = find_network(own, objective_of(loss), trained=trained)
        self._recorder = Recorder(
            model, self.network.objective, self.network.parameters, self.network.buffers
        )
        weakref.finalize(self, remove_hooks, self._recorder.handles)
        self._state = initial_state(self.settings, 0.0, self.network.device)
        self._warned: set[str] = set()

    @torch.no_grad()
    def step(self) -> None:
        """Overwrite `p.grad` of every parameter by the preconditioned gradient.

        If a gradient is not finite on any rank, all gradients stay as they are: a `GradScaler` skips such
        a step. An exception leaves them as they are too.

        Raises:
            LoopError: there are no gradients, or the calls of the model and the loss were not recorded.
            RankError: another rank has failed, or is elsewhere in its loop.
        """
        self._world = World.current()
        try:
            with full_precision(self.network.device), self._recorder.paused():
                self._step()
        except BaseException as error:
            if not isinstance(error, RankError):  # which all ranks know of
                self._world.abandon()
            raise
        finally:
            self._recorder.step()

    def _step(self) -> None:
        if all(p.grad is None for p in self.network.parameters):
            raise LoopError(
                "Preconditioner.step() replaces gradients, but no parameter has one. Call loss.backward() "
                "before step(), and zero_grad() after the optimizer's step()."
            )
        if self._recorder.since.added_to_old:
            self._warn(
                "zero_grad",
                "loss.backward() has added to gradients that the last Preconditioner.step() has "
                "preconditioned, which are now preconditioned again. Call optimizer.zero_grad() before "
                "each backward(), or once before several micro-batches.",
            )
        if not self._all_finite():
            if self._grad_scaler is None:
                self._warn(
                    "gradient",
                    "A gradient is not finite: Preconditioner.step() has left all gradients as they are. "
                    "Skip such a step of the optimizer, or look for the mini-batch.",
                )
            return
        state, step = self._state, self.steps + 1
        updated, refreshed = self._updated, self._refreshed
        if state.current is None or _due(step, updated, self.factor_interval):
            evaluation = self._evaluate(state.iteration + 1)
            if evaluation is None:
                return  # all gradients are zero
            state, updated = self._with_statistics(evaluation, state), step
        if state.current is None or _due(step, refreshed, self.inverse_interval):
            state, refreshed = self._with_inverse(state), step
        if state.current is None:
            return  # warned in _with_inverse
        self._replace(state.current.inverse)
        self._state, self.steps = state, step
        self._updated, self._refreshed = updated, refreshed

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for `torch.save`; the same on all ranks."""
        saved = saving.save(self._state, self.network, self.settings)
        counts = (self.steps, self._updated, self._refreshed)
        return {**dict(zip(COUNTS, counts, strict=True)), "kfac": saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved state, bit for bit; a state that does not fit changes nothing.

        Raises:
            StateError: it is of another model, kind of inverse or version, or damaged.
        """
        given = state_dict if isinstance(state_dict, dict) else {}
        counts = [given.get(name, -1) for name in COUNTS]
        valid = all(isinstance(n, int) and 0 <= n <= counts[0] for n in counts)
        if not valid or "kfac" not in given:
            raise StateError(
                "Preconditioner.load_state_dict takes what Preconditioner.state_dict returned; got "
                f"{type(state_dict).__name__} with {sorted(map(str, given))}."
            )
        state, network = saving.unpack_state(given["kfac"], self.network, self.settings, 0.0)
        self._state, self.network = state, network
        self.steps, self._updated, self._refreshed = counts

    def close(self) -> None:
        """Remove K-FAC's hooks from the model and the loss; there are no steps from then on."""
        remove_hooks(self._recorder.handles)
        self._recorder.forget()

    def _replace(self, inverse: DampedInverse) -> None:
        """p.grad ← ν F̆⁻¹ p.grad, with ν from κ; a parameter without a gradient stays without."""
        network = self.network
        gradient = network.join(
            [torch.zeros_like(p) if p.grad is None else p.grad for p in network.parameters]
        )
        direction, nu = inverse.mv(gradient), 1.0
        if self.kl_clip is not None and self.lr is not None:
            # ν = min(1, √(κ / (lr² gᵀΔ))), by which lr² Δᵀ F̆ Δ of the step is at most κ
            lr = float(self.lr(self.steps) if callable(self.lr) else self.lr)
            length = lr**2 * abs(float(dot(gradient, direction)))
            nu = min(1.0, math.sqrt(self.kl_clip / length)) if length else 1.0
        self._world.gather([], "commit")  # no rank replaces its gradients before all have theirs
        for p, part in zip(network.parameters, network.split(direction), strict=True):
            if p.grad is not None:
                p.grad.copy_(part if nu == 1 else part * nu)

    def _all_finite(self) -> bool:
        """Whether the gradients of all ranks are finite, which are at the same step."""
        own = [float(_finite([p.grad for p in self.network.parameters])), float(self.steps)]
        rows = self._world.gather(own, "gradient")
        if len({row[1] for row in rows}) > 1:
            raise RankError(
                "The ranks have taken different numbers of steps of their Preconditioner: "
                f"{', '.join(str(int(row[1])) for row in rows)}. Load the same state on all ranks, and "
                "call step() equally often."
            )
        return all(row[0] for row in rows)

    def _evaluate(self, iteration: int) -> Evaluation | None:
        """The mini-batch since the last step, as part of that of all ranks."""
        scaler, averaged = self._grad_scaler, self._wrapped
        own = evaluate_loop(
            self._recorder,
            self.network,
            weight_decay=PerParameter(0.0),
            inverse=self.settings.inverse,
            scaling=Scaling(before=None if scaler is None else scaler.get_scale()),
            who="Preconditioner",
            needs_loss=False,
        )
        return join_ranks(self._world, own, iteration=iteration, averaged=averaged, sums=False)[0]

    def _with_statistics(self, evaluation: Evaluation, state: State) -> State:
        """The state with this mini-batch in its moving averages; as it was if they would not be finite."""
        self.network = evaluation.network
        m = Measurement(iteration=state.iteration + 1, examples=evaluation.examples)
        with self.network.buffers.preserved():
            some = choose_examples(self.settings, evaluation, m)
            curvature, current, generator = update_curvature(
                self.settings, evaluation, some, state, m
            )
        if not _finite([number for block in curvature.blocks for number in block.probe()]):
            self._warn(
                "statistics",
                "The statistics of a mini-batch are not finite: Preconditioner.step() has left them out. "
                "Look for infinite inputs or activations.",
            )
            return state
        return replace(
            state,
            iteration=m.iteration,
            curvature=curvature,
            current=current,
            generator=generator,
        )

    def _with_inverse(self, state: State) -> State:
        """The state with a new inverse; the last good one stays where there is none."""
        damping, current = _scheduled(self.damping, self.steps), state.current
        if state.curvature is None:
            return state
        if current and (current.iteration, current.lambda_) == (state.iteration, damping):
            return state  # there is nothing new to invert
        old = None if current is None else current.inverse
        inverter = Inverter(self.settings.inverse, state.curvature, self._world)
        made = inverter.damped(math.sqrt(damping))
        if isinstance(made, Exception):
            inverse, failure = old, str(made)
        else:
            failure = "; ".join(message for _, message in made.failures)
            inverse = made.completed_by(old)
        if failure:
            what = "gradients stay as they are" if inverse is None else "the last one stays in use"
            self._warn("inverse", f"There is no inverse: {failure} {what}. Raise the damping.")
        if inverse is None:
            return state
        return replace(state, current=CurrentInverse(inverse, state.iteration, damping))

    def _warn(self, kind: str, message: str) -> None:
        warn_once(self._warned, kind, message)


def _due(step: int, last: int, interval: int) -> bool:
    """Whether it is time again, counted as KFAC counts its refreshes."""
    return step <= FIRST_REFRESHES or step - last >= min(AGE * step, interval)


def _finite(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all numbers are, asked once."""
    sums = [t.sum(dtype=torch.float64).cpu() for t in tensors if t is not None]
    return not sums or bool(torch.stack(sums).isfinite().all())


def _scheduled(damping: Schedule, steps: int) -> float:
    """The damping after so many steps.

    Raises:
        ValueError: it is not positive and finite.
    """
    value = damping(steps) if callable(damping) else damping
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(
            "Preconditioner's damping is a positive number, or a function from the number of steps to one; "
            f"got {value!r}."
        )
    return float(value)
