"""Everything that K-FAC carries from one step to the next, and how it is saved.

`torch.optim.Optimizer.load_state_dict` casts what it finds to the parameters' dtype, the bytes of a
generator included; so this state has its own way into and out of plain dictionaries. What a rule remembers
goes by the fields of its dataclass: a new rule needs no change here.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kronfac.control import (
    AcceptanceState,
    DampingState,
    GammaState,
    Measurement,
    StepState,
)
from kronfac.errors import StateError
from kronfac.factors import KroneckerFactors
from kronfac.inverses import DampedInverse
from kronfac.inverses.base import pack
from kronfac.layers import Layer, Matrices
from kronfac.packing import Unpacker
from kronfac.refresh import Refresh, packed, unpacked
from kronfac.settings import Settings
from kronfac.state_v6 import from_version_6

VERSION = 7


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
    factors: KroneckerFactors | None = None
    current: CurrentInverse | None = None
    refresh: Refresh | None = None
    """Under way in the background."""


def initial_state(settings: Settings, weight_decay: float, device: torch.device) -> State:
    """The state before the first step."""
    m = Measurement(weight_decay=weight_decay)
    damping = settings.damping.init(m)
    return State(
        iteration=0,
        generator=torch.Generator(device=device).manual_seed(settings.fisher.seed).get_state(),
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


def save(state: State, layers: Sequence[Layer], settings: Settings) -> dict[str, Any]:
    """A dictionary that `torch.load(weights_only=True)` reads back."""
    return {
        "version": VERSION,
        "layers": [layer.name for layer in layers],
        "inverse_settings": repr(settings.inverse),
        **{f.name: pack(getattr(state, f.name)) for f in fields(state) if f.name != "refresh"},
        "refresh": state.refresh and packed(state.refresh),
    }


def load(
    saved: dict[str, Any], layers: Sequence[Layer], settings: Settings, weight_decay: float
) -> tuple[State, list[Layer]]:
    """The state, and the layers in the order that it was saved with.

    Raises:
        StateError: it is of another version, model or kind of inverse, or damaged.
    """
    version = saved.get("version") if isinstance(saved, dict) else None
    if version == 6:
        saved = from_version_6(saved)
    elif version != VERSION:
        raise StateError(
            f"This kronfac reads states of the versions 6 and {VERSION}; got {version!r}."
        )
    expected = {"layers", "inverse_settings", *(f.name for f in fields(State))}
    if missing := expected - saved.keys():
        raise StateError(f"The state is incomplete: it has no {sorted(missing)}.")
    by_name = {layer.name: layer for layer in layers}
    if sorted(by_name) != sorted(saved["layers"]):
        raise StateError(
            f"The state is of a model with layers {saved['layers']}; this one has {sorted(by_name)}."
        )
    ordered = [by_name[name] for name in saved["layers"]]
    inverse = settings.inverse
    if saved["inverse_settings"] != repr(inverse):
        raise StateError(
            f"The state was saved with {saved['inverse_settings']}; this KFAC has {inverse!r}."
        )
    unpacker = Unpacker(ordered[0].parameters()[0].device)
    factors = saved["factors"] and unpacker.unpack(KroneckerFactors, saved["factors"], "factors")
    if factors is not None:
        _check_shapes(factors, ordered)
    try:
        current = saved["current"] and CurrentInverse(
            inverse=inverse.load(unpacker.place(saved["current"]["inverse"])),
            iteration=int(saved["current"]["iteration"]),
            lambda_=float(saved["current"]["lambda_"]),
            decayed=unpacker.place(saved["current"]["decayed"]),
        )
        refresh = saved["refresh"] and unpacked(unpacker.place(saved["refresh"]), inverse)
    except (KeyError, TypeError) as error:
        raise StateError(
            f"The state of the inverse or its refresh is incomplete: {error}."
        ) from error
    fresh = initial_state(settings, weight_decay, torch.device("cpu"))
    damping = unpacker.update(fresh.damping, saved["damping"], "damping")
    if math.isnan(damping.lambda_):  # saved before its first step, which was to find λ
        damping = fresh.damping
    gamma = initial_gamma(settings, damping, weight_decay)
    if gamma is not None and saved["gamma"] is not None:
        gamma = unpacker.update(gamma, saved["gamma"], "gamma")
    state = State(
        iteration=int(saved["iteration"]),
        generator=saved["generator"].clone().cpu(),
        damping=damping,
        gamma=gamma,
        step=unpacker.update(fresh.step, saved["step"], "step"),
        acceptance=unpacker.update(fresh.acceptance, saved["acceptance"], "acceptance"),
        factors=factors,
        current=current,
        # Without a lag every refresh is made at once.
        refresh=refresh if settings.inverse_lag else None,
    )
    return state, ordered


def _check_shapes(factors: KroneckerFactors, layers: Sequence[Layer]) -> None:
    for layer, A, G in zip(layers, factors.A, factors.G, strict=True):
        dtype = layer.parameters()[0].dtype
        if {A.dtype, G.dtype} != {dtype}:
            raise StateError(
                f"The state's factors of layer {layer.name!r} are {A.dtype}; the layer is {dtype}."
            )
        if (len(G), len(A)) != layer.shape:
            raise StateError(
                f"The state's factors of layer {layer.name!r} are for a matrix of shape "
                f"{(len(G), len(A))}; the layer has {layer.shape}."
            )
