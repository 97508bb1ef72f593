"""K-FAC's state to plain dictionaries and back, in the form that all of torch's optimizers have.

    {"state": {0: {"momentum_buffer": …}, …}, "param_groups": [{"params": [0, …], "lr": …}, …], "kfac": …}

`torch.optim.Optimizer.load_state_dict` casts what it finds to the parameters' dtype, the bytes of a
generator included. So `"kfac"`, which has all but the momentum buffers and the groups' options, has its own
way into and out of plain dictionaries (`storage.py`). It is read and checked as a whole before anything
changes. What a rule remembers goes by the fields of its dataclass: a new rule needs no change here.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kronfac.control import Measurement
from kronfac.curvature import Curvature, DampedInverse
from kronfac.errors import NotPositiveDefiniteError, StateError
from kronfac.groups import Groups, PerParameter, check_group, parameters_in
from kronfac.model import Learned, Matrices, Network, Unit
from kronfac.settings import Settings
from kronfac.step.background import Outcome, Outcomes, Refresh
from kronfac.step.state import State, initial_gamma, initial_state
from kronfac.storage import Layout, Unpacker, map_tensors, pack, tensors_in

S = TypeVar("S")

VERSION = 1
MOMENTUM = "momentum_buffer"
"""The entry of `optimizer.state[p]` for δ₀, by the name that it has in torch.optim.SGD."""
ENTRIES = ("state", "param_groups", "kfac")
FOREIGN = ("momentum", "betas")
"""Options that K-FAC's groups don't have, and those of other optimizers with such a buffer do."""

Options = dict[str, Any]


def saved_groups(groups: Groups, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    """The entries `"state"`, with copies of its dicts, and `"param_groups"`."""
    numbers = {p: n for n, p in enumerate(parameters_in(groups))}
    return {
        "state": {numbers[p]: dict(entry) for p, entry in state.items()},
        "param_groups": [
            {**group, "params": [numbers[p] for p in group["params"]]} for group in groups
        ],
    }


def loaded_options(saved: Any, groups: Groups) -> list[Options]:
    """The options of each group in a saved state.

    Raises:
        StateError: this is the state of no KFAC, or of one with other groups.
    """
    if not isinstance(saved, dict) or not {"kfac", "param_groups"} & saved.keys():
        raise _not_kfacs(saved)
    if "param_groups" not in saved:
        raise StateError("This is not the state_dict of a KFAC: it has no entry 'param_groups'.")
    if unknown := [entry for entry in saved if entry not in ENTRIES]:
        raise StateError(f"The state has entries that are not known here: {unknown}.")
    given = saved["param_groups"]
    if "kfac" not in saved and (not isinstance(given, list) or any(_foreign(g) for g in given)):
        raise _not_kfacs(saved)
    if not isinstance(given, list) or not all(isinstance(group, dict) for group in given):
        raise StateError("The state's param_groups must be a list of dicts. Load an earlier state.")
    sizes = [
        len(group["params"]) if isinstance(group.get("params"), list) else None for group in given
    ]
    if sizes != (expected := [len(group["params"]) for group in groups]):
        raise StateError(
            f"The state has parameter groups of {sizes} parameters; this KFAC has {expected}. Make the "
            "same groups before it is loaded, with add_param_group those that were added later."
        )
    for number, group in enumerate(given):
        if missing := [key for key in ("lr", "weight_decay") if key not in group]:
            raise StateError(
                f"The state's parameter group {number} is incomplete: it has no {missing}."
            )
    numbers = [n for group in given for n in group["params"]]
    if "kfac" in saved and numbers != list(range(len(numbers))):
        raise StateError(f"The state's parameters must be numbered from 0 on; got {numbers}.")
    options = [{key: v for key, v in group.items() if key != "params"} for group in given]
    for own, values in zip(groups, options, strict=True):
        if "param_names" in own:
            values.setdefault("param_names", own["param_names"])
    return _checked(options, groups)


def _foreign(group: Any) -> bool:
    return not isinstance(group, dict) or any(key in group for key in FOREIGN)


def _not_kfacs(saved: Any) -> StateError:
    got = sorted(map(str, saved)) if isinstance(saved, dict) else type(saved).__name__
    return StateError(
        f"This is not the state_dict of a KFAC: it has no entry 'kfac'; got {_short(got)}. Load what "
        "KFAC.state_dict() returned; after another optimizer, load the model's parameters alone and begin "
        "with a new KFAC."
    )


def _short(names: list[str] | str) -> str:
    if isinstance(names, str):
        return f"a {names}"
    return ", ".join(map(repr, names[:4])) + (", …" if len(names) > 4 else "") or "nothing"


def _checked(options: list[Options], groups: Groups) -> list[Options]:
    for number, (values, group) in enumerate(zip(options, groups, strict=True)):
        try:
            check_group({**group, **values}, number)
        except ValueError as error:
            raise StateError(f"The state can't be loaded: {error}") from error
    return options


def with_options(groups: Groups, options: Sequence[Options], key: str) -> PerParameter:
    """What parameters would have under this key with these options."""
    updated = [{**group, **values} for group, values in zip(groups, options, strict=True)]
    return PerParameter.of_groups(updated, key)


def loaded_buffers(saved: Mapping[str, Any], groups: Groups) -> list[Tensor] | None:
    """The momentum buffers of all parameters; None before the first step.

    Raises:
        StateError: there is none for some parameter, or one that can't be.
    """
    entries = saved.get("state")
    if entries == {}:
        return None
    if not isinstance(entries, dict):
        raise StateError("The state has no dict 'state' with the momentum buffers.")
    numbers = [n for group in saved["param_groups"] for n in group["params"]]
    if unknown := [n for n in entries if n not in numbers]:
        raise StateError(f"The state has momentum buffers of {unknown}, which are in no group.")
    buffers = []
    for p, number in zip(parameters_in(groups), numbers, strict=True):
        entry = entries.get(number)
        buffer = entry.get(MOMENTUM) if isinstance(entry, dict) else None
        alone = isinstance(entry, dict) and len(entry) == 1
        if not alone or not isinstance(buffer, Tensor) or buffer.shape != p.shape:
            raise StateError(
                f"The state must have a {MOMENTUM} of the shape {tuple(p.shape)}, and that alone, for "
                f"parameter {number}. Load the state of a KFAC, for the same model."
            )
        if not bool(buffer.isfinite().all()):
            raise StateError(f"The state's {MOMENTUM} of parameter {number} must be finite.")
        buffers.append(buffer)
    if len({buffer.dtype for buffer in buffers}) > len({p.dtype for p in parameters_in(groups)}):
        raise StateError("The state's momentum buffers differ in dtype. Load an earlier state.")
    return buffers


def momentum_of(
    buffers: Sequence[Tensor] | None, groups: Groups, network: Network
) -> Matrices | None:
    """The momentum buffer as one vector, in the parameters' dtype; None if it is zero."""
    if buffers is None or not any(bool(buffer.any()) for buffer in buffers):
        return None
    pairs = zip(parameters_in(groups), buffers, strict=True)
    return _join(network, {p: buffer.to(p) for p, buffer in pairs})


def is_zero(momentum: Matrices | None) -> bool:
    """Whether there is no momentum, or none left."""
    return momentum is None or not any(bool(V.any()) for V in momentum)


def extended_momentum(old: Network, new: Network, momentum: Matrices | None) -> Matrices | None:
    """The momentum buffer of a network with further parameters, for which it is zero."""
    if momentum is None:
        return None
    known = dict(zip(old.parameters, old.split(momentum), strict=True))
    return _join(new, {p: known.get(p, torch.zeros_like(p)) for p in new.parameters})


def _join(network: Network, tensors: Mapping[nn.Parameter, Tensor]) -> Matrices:
    joined = network.join([tensors[p].detach() for p in network.parameters])
    return tuple(V.clone() for V in joined)


@dataclass(frozen=True)
class SavedRefresh:
    """A refresh with its outcomes, which can be saved."""

    iteration: int
    adoption: int
    lambda_: float
    candidates: tuple[float, ...]
    inverses: tuple[DampedInverse | str, ...]
    """Or why there is none."""

    def __post_init__(self) -> None:
        if not len(self.candidates) == len(self.inverses) > 0:
            raise ValueError(
                f"it must have an outcome for each candidate; got {len(self.inverses)} outcomes for "
                f"{len(self.candidates)} candidates."
            )

    @classmethod
    def of(cls, refresh: Refresh) -> "SavedRefresh":
        """Wait for the outcomes; with several ranks, all of them have to."""
        outcomes = tuple(str(o) if isinstance(o, Exception) else o for o in refresh.outcomes)
        numbers = refresh.iteration, refresh.adoption, refresh.lambda_, refresh.candidates
        return cls(*numbers, outcomes)

    @property
    def finished(self) -> list[DampedInverse]:
        """The inverses that there are."""
        return [inverse for inverse in self.inverses if not isinstance(inverse, str)]

    def restored(self) -> Refresh:
        """The refresh, done."""
        outcomes: list[Outcome] = [
            NotPositiveDefiniteError(o) if isinstance(o, str) else o for o in self.inverses
        ]
        numbers = self.iteration, self.adoption, self.lambda_, self.candidates
        return Refresh(*numbers, _Loaded(outcomes))


@dataclass(frozen=True)
class _Loaded(Outcomes):
    """Outcomes from a file."""

    outcomes: list[Outcome]

    def __iter__(self) -> Iterator[Outcome]:
        return iter(self.outcomes)


@dataclass(frozen=True, kw_only=True)
class SavedState(State):
    """What `state_dict()["kfac"]` holds."""

    version: int
    units: tuple[str, ...]
    inverse_settings: str
    refresh: SavedRefresh | None  # type: ignore[assignment]
    learned: Learned
    """What passes have shown of the network."""

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
    # The state was brought to where the parameters are.
    network = replace(network, placed=None)
    return Loaded(state, network, options)


def unpack_state(
    packed: Any, units: Sequence[Unit], settings: Settings, weight_decay: float
) -> tuple[State, Sequence[int], Learned]:
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
