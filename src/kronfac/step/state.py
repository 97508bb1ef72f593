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
    StepState,
)
from kronfac.curvature import Curvature, DampedInverse
from kronfac.errors import StateError
from kronfac.groups import Groups
from kronfac.model import LearnedState, Matrices, Network, Unit, check_moments
from kronfac.settings import Settings
from kronfac.step.refresh import Refresh, SavedRefresh
from kronfac.step.state_groups import (
    Options,
    is_zero,
    loaded_buffers,
    loaded_options,
    momentum_of,
    with_options,
)
from kronfac.storage import Layout, Unpacker, map_tensors, pack, tensors_in

S = TypeVar("S")

VERSION = 1


@dataclass(frozen=True)
class CurrentInverse:
    """The inverse that is in use."""

    inverse: DampedInverse
    iteration: int
    """Iteration of the factors that it was computed from."""
    lambda_: float
    """λ then."""
    decayed: Matrices | None = None
    """η F̆⁻¹θ of the step that adopted it, for the low-rank route [MG15 §8]."""


@dataclass(frozen=True)
class CheckState:
    """What comparisons of the gradient with the recorded losses have found (`kronfac.check`)."""

    compared: bool = False
    """Whether there was one."""
    follows_returned: bool = False
    """Whether the loss is scaled as the returned one is, by a GradScaler in the closure."""
    scale: float = 1.0
    """The factor of the gradients of all steps."""
    scales: tuple[float | None, float | None] = (None, None)
    """The factors in the last two comparisons."""

    @property
    def clips(self) -> bool:
        """Whether the factor differs from step to step, as clipping makes it."""
        earlier, last = self.scales
        return earlier is not None and earlier != last

    @property
    def undecided(self) -> bool:
        """Whether a factor was found once: the next comparison tells clipping from a factor of the loss."""
        earlier, last = self.scales
        return earlier is None and last not in (None, 1.0)


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
    gradients: CheckState = CheckState()
    """What checks of the gradient have found."""


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
        step=settings.step_rule.init(m),
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
    iteration: int
    generator: Tensor
    damping: DampingState
    gamma: GammaState | None
    step: StepState
    acceptance: AcceptanceState
    curvature: Curvature | None
    current: CurrentInverse | None
    refresh: SavedRefresh | None
    learned: LearnedState
    """What passes have shown of the network."""
    gradients: CheckState

    def check(self, units: Sequence[Layout]) -> None:
        """Raise a StateError if curvature or inverses don't fit these units."""
        inverses = [] if self.current is None else [self.current.inverse]
        inverses += [] if self.refresh is None else self.refresh.finished
        for part in (self.curvature, *inverses):
            if part is not None:
                part.check(*units)


def save(state: State, network: Network, settings: Settings) -> dict[str, Any]:
    """A dictionary that `torch.load(weights_only=True)` reads back, the same in all processes."""
    saved = SavedState(
        version=VERSION,
        units=tuple(unit.name for unit in network.units),
        inverse_settings=repr(settings.inverse),
        **{f.name: getattr(state, f.name) for f in fields(state) if f.name != "refresh"},
        refresh=None if state.refresh is None else SavedRefresh.of(state.refresh),
        learned=network.learned_state(),
    )
    packed: dict[str, Any] = pack(saved)
    return packed


@dataclass(frozen=True)
class Loaded:
    """A state that fits, and what comes with it."""

    state: State
    network: Network
    """With the order, links and blocks of its units that they had when the state was saved."""
    options: list[Options]
    """Of each parameter group."""


def load(state_dict: Any, groups: Groups, network: Network, settings: Settings) -> Loaded:
    """Read and check a whole `state_dict`; nothing is changed.

    Raises:
        StateError: it is of another version, model or kind of inverse, or damaged.
    """
    packed = state_dict.get("kfac") if isinstance(state_dict, dict) else None
    _check_units(packed, network.units)
    options = loaded_options(state_dict, groups)
    eta = with_options(groups, options, "weight_decay").least
    if "kfac" not in state_dict:  # from torch's distributed checkpoints
        momentum = momentum_of(loaded_buffers(state_dict, groups), groups, network)
        state = initial_state(settings, eta, network.device)
        state = replace(state, step=replace(state.step, momentum=momentum))
    else:
        state, order, learned = unpack_state(packed, network.units, settings, eta)
        momentum = momentum_of(loaded_buffers(state_dict, groups), groups, network)
        if "state" in state_dict and is_zero(momentum) != is_zero(state.step.momentum):
            raise StateError("The state has momentum in one of 'state' and 'kfac' only.")
        network = network.continued(order, state.curvature, learned)
        check_moments(state.curvature, network.units)
    # The state was brought to where the parameters are.
    network = replace(network, learned=replace(network.learned, placement=None))
    return Loaded(state, network, options)


def unpack_state(
    packed: Any, units: Sequence[Unit], settings: Settings, weight_decay: float
) -> tuple[State, Sequence[int], LearnedState]:
    """The state, the units' numbers in the order that they were saved in, and what passes have shown.

    Raises:
        StateError: it is of another version, model or kind of inverse, or damaged.
    """
    version = packed.get("version") if isinstance(packed, dict) else None
    if version != VERSION:
        raise StateError(
            f"This kronfac reads states of version {VERSION}; got version {version!r}. Load it with the "
            "kronfac that saved it."
        )
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
    return state, order, saved.learned


def _check_units(packed: Any, units: Sequence[Unit]) -> None:
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
        acceptance=_adopted(fresh.acceptance, saved.acceptance),
        curvature=saved.curvature,
        current=saved.current,
        # Without a lag every refresh is made at once.
        refresh=saved.refresh.restored()
        if saved.refresh and settings.intervals.inverse_lag
        else None,
        gradients=saved.gradients,
    )


def _adopted(fresh: S, saved: Any) -> S:
    """What a rule remembers, from what another rule of its kind did: the fields of their common class."""
    common = next(kind for kind in type(fresh).__mro__ if isinstance(saved, kind))
    return replace(fresh, **{f.name: getattr(saved, f.name) for f in fields(common)})  # type: ignore[type-var]
