"""K-FAC's state to plain dictionaries and back, in the form that all of torch's optimizers have.

    {"state": {0: {"momentum_buffer": …}, …}, "param_groups": [{"params": [0, …], "lr": …}, …], "kfac": …}

`torch.optim.Optimizer.load_state_dict` casts what it finds to the parameters' dtype, the bytes of a
generator included. So `"kfac"`, which has the whole state, has its own way into and out of plain
dictionaries (`storage.py`); `"state"` shows the momentum buffers in it by parameter, and is not read. All
else is read and checked before anything changes. A rule's memory is saved by the fields of its dataclass,
so that a new rule needs no change here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from kronfac.control import Measurement
from kronfac.distributed import World
from kronfac.errors import StateError
from kronfac.groups import Groups, PerParameter, check_group, parameters_in
from kronfac.model import Learned, Matrices, Network, Unit
from kronfac.record.discovery import learned_state, restored
from kronfac.settings import Settings
from kronfac.step.inverses import Inverter
from kronfac.step.state import State, initial_gamma, initial_state
from kronfac.storage import Layout, check_vector, pack, tensors_in, unpack

S = TypeVar("S")

VERSION = 1
MOMENTUM = "momentum_buffer"
"""The entry of `optimizer.state[p]` for δ₀, by the name that it has in torch.optim.SGD."""
ENTRIES = ("state", "param_groups", "kfac")

Options = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class SavedState(State):
    """What `state_dict()["kfac"]` holds."""

    version: int
    units: tuple[str, ...]
    inverse_settings: str
    learned: Learned
    """What passes have shown of the network."""

    def check(self, *units: Layout) -> None:
        """Raise a StateError if curvature, inverse or vectors in parameter space don't fit these units."""
        pending = self.acceptance.pending
        kept = None if pending is None else pending.kept
        vectors = {
            "momentum": self.step.momentum,
            "average": self.step.memory.average,
            "pending.delta": None if pending is None else pending.delta,
            "kept.theta": None if kept is None else kept.theta,
            "kept.momentum": None if kept is None else kept.momentum,
        }
        for name, vector in vectors.items():
            if vector is not None:
                check_vector(vector, units, name)
        inverse = None if self.current is None else self.current.inverse
        started = None if self.refresh is None else self.refresh.curvature
        for part in (self.curvature, inverse, started):
            if part is not None:
                part.check(*units)


def save(state: State, network: Network, settings: Settings) -> dict[str, Any]:
    """A dictionary that `torch.load(weights_only=True)` reads back, the same in all processes."""
    saved = SavedState(
        version=VERSION,
        units=tuple(unit.name for unit in network.units),
        inverse_settings=repr(settings.inverse),
        **{f.name: getattr(state, f.name) for f in fields(state)},
        learned=learned_state(network),
    )
    packed: dict[str, Any] = pack(saved)
    return packed


def saved_groups(groups: Groups, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """The entries `"state"`, with copies of its dicts, and `"param_groups"`."""
    numbers = {p: n for n, p in enumerate(parameters_in(groups))}
    return {
        "state": {numbers[p]: dict(entry) for p, entry in state.items()},
        "param_groups": [
            {**group, "params": [numbers[p] for p in group["params"]]} for group in groups
        ],
    }


@contextmanager
def _damage_as_state_errors() -> Iterator[None]:
    """Raise a StateError for any error that a damaged state causes while it is read."""
    try:
        yield
    except StateError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise StateError(
            f"The state can't be read; load an earlier one. {type(error).__name__}: {error}"
        ) from error


@_damage_as_state_errors()
def load(
    state_dict: Any, groups: Groups, network: Network, settings: Settings
) -> tuple[State, Network, list[Options]]:
    """Read and check a whole `state_dict`; nothing is changed.

    Returns the state, the network with its units as they were when the state was saved (their order, links
    and blocks), and the options of each parameter group.

    Raises:
        StateError: it is of another version, model or kind of inverse, or damaged.
    """
    if not isinstance(state_dict, dict) or "kfac" not in state_dict:
        given = sorted(map(str, state_dict)) if isinstance(state_dict, dict) else type(state_dict)
        raise StateError(
            f"This is not the state_dict of a KFAC: it has no entry 'kfac'; got {given}. Load what "
            "KFAC.state_dict() returned, or use kronfac.distributed.WholeState with torch's distributed "
            "checkpoints, whose own helpers leave it out. After another optimizer, load the model's "
            "parameters alone and begin with a new KFAC."
        )
    packed = state_dict["kfac"]
    _order(packed, network.units)
    if {*state_dict} != {*ENTRIES}:
        raise StateError(
            f"The state_dict of a KFAC has the entries {', '.join(ENTRIES)}; got "
            f"{', '.join(map(str, state_dict))}. Load what KFAC.state_dict() returned."
        )
    options = _loaded_options(state_dict["param_groups"], groups)
    updated = [{**group, **values} for group, values in zip(groups, options, strict=True)]
    eta = PerParameter.of_groups(updated, "weight_decay").least
    state, network = unpack_state(packed, network, settings, eta)
    # The state was brought to where the parameters are.
    return state, replace(network, placed=None), options


def _loaded_options(given: Any, groups: Groups) -> list[Options]:
    """The options of each group in a saved state.

    Raises:
        StateError: they are of other groups, or can't be options.
    """
    own = saved_groups(groups, {})["param_groups"]
    if [group.get("params") for group in given] != [group["params"] for group in own]:
        raise StateError(
            f"The state has parameter groups of {[group.get('params') for group in given]}; those of this "
            f"KFAC are of {[group['params'] for group in own]}. Make the same groups before it is loaded, "
            "with add_param_group those that were added later."
        )
    options = [{key: v for key, v in group.items() if key != "params"} for group in given]
    for number, (group, values) in enumerate(zip(groups, options, strict=True)):
        check_group(values, number)
        if "param_names" in group:
            values.setdefault("param_names", group["param_names"])
    return options


@_damage_as_state_errors()
def unpack_state(
    packed: Any, network: Network, settings: Settings, weight_decay: float
) -> tuple[State, Network]:
    """The state, and the network as it was when that was saved.

    Raises:
        StateError: it is of another version, model or kind of inverse, or damaged.
    """
    version = packed.get("version") if isinstance(packed, dict) else None
    if version != VERSION:
        raise StateError(
            f"This kronfac reads states of version {VERSION}; got version {version!r}. Load it with the "
            "kronfac that saved it."
        )
    if (saved_with := packed.get("inverse_settings")) != repr(settings.inverse):
        raise StateError(
            f"The state was saved with {saved_with}; this KFAC has {settings.inverse!r}. Make one with "
            "the same inverse."
        )
    units, device = network.units, network.device
    order = _order(packed, units)
    layouts = [Layout(units[n].name, *units[n].shape, units[n].dtype) for n in order]
    fresh = initial_state(settings, weight_decay, device)
    # γ's memory for its class alone: λ may not be known yet.
    gamma = settings.gamma.init(Measurement(lambda_=1.0, weight_decay=weight_decay))
    rules = (fresh.damping, gamma, fresh.step, fresh.acceptance)
    saved: SavedState = unpack(
        packed, device, dtype=_other_dtype(packed, units), classes=map(type, rules)
    )
    saved.check(*layouts)
    curvature, neighbours = saved.curvature, len(units) - 1
    if curvature and settings.inverse.couples and len(curvature.links) != neighbours:
        raise StateError(
            f"The state's curvature must have a link, or None, for each of {neighbours} pairs of units; "
            f"got {len(curvature.links)}. Load an earlier state."
        )
    state = _continued(saved, fresh, settings, weight_decay)
    network = restored(network, order, state.curvature, saved.learned)
    return state, network


def _order(packed: Any, units: Sequence[Unit]) -> list[int]:
    """The units' numbers, in the order that they were saved in."""
    names = packed.get("units") if isinstance(packed, dict) else None
    numbers = {unit.name: n for n, unit in enumerate(units)}
    if not isinstance(names, list) or sorted(numbers) != sorted(map(str, names)):
        raise StateError(
            f"The state is of a model with {names}; this one has {sorted(numbers)}. Load it into "
            "the model that it was saved with."
        )
    return [numbers[str(name)] for name in names]


def _other_dtype(packed: Any, units: Sequence[Unit]) -> torch.dtype | None:
    """The parameters' dtype, if all of a state is in one other; a single odd tensor is damage."""
    floating = {t.dtype for t in tensors_in(packed) if t.is_floating_point()}
    own = {unit.dtype for unit in units}
    return own.pop() if len(floating) == len(own) == 1 and floating != own else None


def _continued(saved: SavedState, fresh: State, settings: Settings, weight_decay: float) -> State:
    """The loaded state, with the fields that today's rules share with the saved ones."""
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
    refresh = None  # without a lag every refresh is made at once
    if saved.refresh is not None and settings.intervals.inverse_lag:
        inverter = Inverter(settings.inverse, saved.refresh.curvature, World.current())
        refresh = replace(saved.refresh, inverter=inverter)
    return State(
        iteration=saved.iteration,
        generator=generator,
        damping=damping,
        gamma=gamma,
        step=_adopted(fresh.step, saved.step),
        acceptance=_adopted(fresh.acceptance, saved.acceptance),
        curvature=saved.curvature,
        current=saved.current,
        refresh=refresh,
        gradients=_adopted(fresh.gradients, saved.gradients),
    )


def _adopted(fresh: S, saved: Any) -> S:
    """A rule's memory, made from that of another rule: the fields of their common class."""
    shared = [k for k in type(fresh).__mro__ if is_dataclass(k) and isinstance(saved, k)]
    if not shared:
        raise StateError(
            f"The state has {type(saved).__name__} where this KFAC has {type(fresh).__name__}, and the two "
            "have nothing in common. Make a KFAC with the rules that it was saved with."
        )
    return replace(fresh, **{f.name: getattr(saved, f.name) for f in fields(shared[0])})  # type: ignore[type-var]


def extended_momentum(old: Network, new: Network, momentum: Matrices | None) -> Matrices | None:
    """The momentum buffer of a network with further parameters, for which it is zero."""
    if momentum is None:
        return None
    known = dict(zip(old.parameters, old.split(momentum), strict=True))
    parts = [known.get(p, torch.zeros_like(p)) for p in new.parameters]
    return tuple(V.clone() for V in new.join([part.detach() for part in parts]))
