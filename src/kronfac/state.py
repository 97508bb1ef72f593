"""Everything that K-FAC carries from one step to the next, and how it is saved.

`torch.optim.Optimizer.load_state_dict` casts what it finds to the parameters' dtype, the bytes of a
generator included; so this state has its own way into and out of plain dictionaries (`storage.py`). It is
read and checked as a whole before anything changes. What a rule remembers goes by the fields of its
dataclass: a new rule needs no change here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from kronfac.control import (
    AcceptanceState,
    DampingState,
    GammaState,
    Measurement,
    SlopeState,
    StepState,
)
from kronfac.curvature import Curvature, DampedInverse
from kronfac.distributed import Phase
from kronfac.errors import StateError
from kronfac.gradient_memory import GradientMemory
from kronfac.iterate_average import IterateAverage
from kronfac.network import LearnedState, Matrices, Network, Unit, check_moments
from kronfac.ranges import Count, NotNegative
from kronfac.refresh import Refresh, SavedRefresh
from kronfac.settings import Settings
from kronfac.state_versions import upgrade
from kronfac.storage import Layout, Unpacker, map_tensors, pack, tensors_in

S = TypeVar("S")

VERSION = 10


@dataclass(frozen=True)
class CurrentInverse:
    """The inverse that is in use."""

    inverse: DampedInverse
    iteration: Count
    """Iteration of the factors that it was computed from."""
    lambda_: NotNegative
    """λ then."""
    decayed: Matrices | None = None
    """η F̆⁻¹θ of the step that adopted it, for the low-rank route [MG15 §8]."""


@dataclass(frozen=True)
class State:
    """The optimizer between two steps: a value, replaced as a whole when a step is committed."""

    iteration: int
    """Steps taken."""
    generator: Tensor
    """State of the generator that targets are drawn with, bytes."""
    damping: DampingState
    gamma: GammaState | None
    """None until λ is known."""
    step: StepState
    acceptance: AcceptanceState
    curvature: Curvature | None = None
    current: CurrentInverse | None = None
    refresh: Refresh | None = None
    """Under way in the background."""
    average: IterateAverage | None = None
    """For evaluation, if it is wanted."""


def initial_state(settings: Settings, weight_decay: float, device: torch.device) -> State:
    """The state before the first step."""
    m = Measurement(weight_decay=weight_decay)
    damping = settings.damping.init(m)
    # A model without storage can be planned for, and nothing is drawn there.
    generator = torch.Generator(device="cpu" if device.type == "meta" else device)
    return State(
        iteration=0,
        generator=generator.manual_seed(settings.fisher.seed).get_state(),
        damping=damping,
        gamma=initial_gamma(settings, damping, weight_decay),
        step=settings.step_size.init(m),
        acceptance=settings.acceptance.init(m),
    )


def initial_gamma(
    settings: Settings, damping: DampingState, weight_decay: float
) -> GammaState | None:
    """What the rule for γ remembers at first; None if λ is not known."""
    if math.isnan(damping.lambda_):  # NaN
        return None
    m = Measurement(lambda_=damping.lambda_, weight_decay=weight_decay)
    gamma: GammaState = settings.gamma.init(m)
    return gamma


# --------------------------------------------------------------------------------------------- saving


@dataclass(frozen=True)
class SavedState:
    """What `state_dict()["kfac"]` holds."""

    version: int
    units: tuple[str, ...]
    inverse_settings: str
    iteration: Count
    generator: Tensor
    damping: DampingState
    gamma: GammaState | None
    step: StepState
    acceptance: AcceptanceState
    curvature: Curvature | None
    current: CurrentInverse | None
    refresh: SavedRefresh | None
    average: IterateAverage | None
    learned: LearnedState | None
    """What passes have shown of the network; None in states of earlier versions."""
    gradients: GradientMemory | None
    """What comparisons of gradients have found; None if there are none, or in such states."""

    def check(self, units: Sequence[Layout]) -> None:
        """Raise a StateError if the parts don't fit these units, or each other."""
        inverses = [] if self.current is None else [self.current.inverse]
        inverses += [] if self.refresh is None else self.refresh.finished
        for part in (self.curvature, *inverses):
            if part is not None:
                part.check(*units)
        k = self.iteration
        refresh, current = self.refresh, self.current
        rules = {
            "λ, γ, curvature and an inverse are known after the first step": k == 0
            or not (
                math.isnan(self.damping.lambda_) or None in (self.gamma, self.curvature, current)
            ),
            "γ is known if λ is": self.gamma is not None or math.isnan(self.damping.lambda_),
            "the inverse in use is complete": current is None or not current.inverse.failures,
            "nothing is of a later iteration": k
            >= max(
                self.acceptance.validated,
                self.step.memory.start,
                0 if current is None else current.iteration,
                0 if refresh is None else refresh.iteration,
            ),
        }
        if broken := [rule for rule, holds in rules.items() if not holds]:
            raise StateError(
                f"The state, of iteration {k}, contradicts itself: {'; '.join(broken)}. "
                "Load an earlier one."
            )


def save(
    state: State,
    network: Network,
    settings: Settings,
    gradients: GradientMemory | None = None,
) -> dict[str, Any]:
    """A dictionary that `torch.load(weights_only=True)` reads back, the same in all processes.

    If each of them holds a part of the inverse, all of them make one whole.
    """
    if (current := state.current) is not None:
        whole = current.inverse.gathered(Phase.STATE, on_host=True)
        state = replace(state, current=replace(current, inverse=whole))
    saved = SavedState(
        version=VERSION,
        units=tuple(unit.name for unit in network.units),
        inverse_settings=repr(settings.inverse),
        **{f.name: getattr(state, f.name) for f in fields(state) if f.name != "refresh"},
        refresh=None if state.refresh is None else SavedRefresh.of(state.refresh),
        learned=network.learned_state(),
        gradients=gradients,
    )
    packed: dict[str, Any] = pack(saved)
    return packed


@dataclass(frozen=True)
class Loaded:
    """A state that fits."""

    state: State
    order: Sequence[int]
    """The numbers of the units, in the order that they were saved in."""
    learned: LearnedState | None
    gradients: GradientMemory | None


def load(packed: Any, units: Sequence[Unit], settings: Settings, weight_decay: float) -> Loaded:
    """Read and check what `save` made; nothing is changed.

    Raises:
        StateError: it is of another version, model or kind of inverse, or damaged.
    """
    version = packed.get("version") if isinstance(packed, dict) else None
    if version != VERSION:
        packed = upgrade(packed, version, settings.inverse, VERSION)
    device = units[0].parameters[0].device
    packed = _in_dtype(packed, {unit.dtype for unit in units})
    plain = Unpacker(device)
    order = _order(plain.unpack(tuple[str, ...], packed.get("units"), "units"), units)
    if (saved_with := packed.get("inverse_settings")) != repr(settings.inverse):
        raise StateError(
            f"The state was saved with {saved_with}; this KFAC has {settings.inverse!r}. Make one with "
            "the same inverse."
        )
    ordered = [units[n] for n in order]
    layouts = [Layout(unit.name, *unit.shape, unit.dtype) for unit in ordered]
    fresh = initial_state(settings, weight_decay, device)
    # γ's memory for its class alone: λ may not be known yet.
    gamma = settings.gamma.init(Measurement(lambda_=1.0, weight_decay=weight_decay))
    rules = (fresh.damping, gamma, fresh.step, fresh.acceptance)
    saved = Unpacker(device, layouts, map(type, rules)).unpack(SavedState, packed)
    saved.check(layouts)
    check_moments(saved.curvature, [unit.undiscovered for unit in ordered])
    _check_links(saved.curvature, settings)
    state = _continued(saved, fresh, settings, weight_decay)
    return Loaded(state, order, saved.learned, saved.gradients)


def check_units(packed: Any, units: Sequence[Unit]) -> None:
    """Raise a StateError if this is plainly the state of another model."""
    names = packed.get("units") if isinstance(packed, dict) else None
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        _order(names, units)


def _order(names: Sequence[str], units: Sequence[Unit]) -> list[int]:
    numbers = {unit.name: n for n, unit in enumerate(units)}
    if sorted(numbers) != sorted(names):
        raise StateError(
            f"The state is of a model with {list(names)}; this one has {sorted(numbers)}. Load it into "
            "the model that it was saved with."
        )
    return [numbers[name] for name in names]


def _in_dtype(packed: Any, dtypes: set[torch.dtype]) -> Any:
    """The state in the parameters' dtype, if all of it is in one other; a single odd tensor is damage."""
    floating = {t.dtype for t in tensors_in(packed) if t.is_floating_point()}
    if len(floating) != 1 or len(dtypes) != 1 or floating == dtypes:
        return packed
    (dtype,) = dtypes
    return map_tensors(packed, lambda t: t.to(dtype) if t.is_floating_point() else t)


def _check_links(curvature: Curvature | None, settings: Settings) -> None:
    if curvature is None or not settings.inverse.couples:
        return
    units, links = len(curvature.blocks), len(curvature.links)
    if links != units - 1:
        raise StateError(
            f"The state's curvature must have a link, or None, between any two of {units} units; got "
            f"{links}. Load an earlier state."
        )


def _continued(saved: SavedState, fresh: State, settings: Settings, weight_decay: float) -> State:
    """The state with what today's rules have in common with those that it was saved with."""
    damping = _adopted(fresh.damping, saved.damping)
    if math.isnan(damping.lambda_):  # saved before its first step, which was to find λ
        damping = fresh.damping
    gamma = initial_gamma(settings, damping, weight_decay)
    if gamma is not None and saved.gamma is not None:
        gamma = _adopted(gamma, saved.gamma)
    acceptance = saved.acceptance
    if not isinstance(acceptance, SlopeState):
        acceptance = _adopted(fresh.acceptance, acceptance)
    generator = saved.generator.cpu()
    try:
        torch.Generator(device=saved.generator.device).set_state(generator)
    except (RuntimeError, TypeError) as error:
        raise StateError(
            f"The state's generator is none of a generator on {saved.generator.device}: {error}"
        ) from error
    return State(
        iteration=saved.iteration,
        generator=generator,
        damping=damping,
        gamma=gamma,
        step=_adopted(fresh.step, saved.step),
        acceptance=acceptance,
        curvature=saved.curvature,
        current=saved.current,
        # Without a lag every refresh is made at once.
        refresh=saved.refresh.restored() if saved.refresh and settings.inverse_lag else None,
        average=saved.average,
    )


def _adopted(fresh: S, saved: Any) -> S:
    """What a rule remembers, from what another rule of its kind did: the fields of their common class."""
    common = next(kind for kind in type(fresh).__mro__ if isinstance(saved, kind))
    return replace(fresh, **{f.name: getattr(saved, f.name) for f in fields(common)})  # type: ignore[type-var]
