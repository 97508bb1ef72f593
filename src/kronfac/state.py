"""Everything that K-FAC carries from one step to the next, and how it is saved.

`torch.optim.Optimizer.load_state_dict` casts what it finds to the parameters' dtype, the bytes of a
generator included; so this state has its own way into and out of plain dictionaries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from kronfac.errors import StateError
from kronfac.factors import KroneckerFactors
from kronfac.inverses import ApproximateInverse, DampedInverse
from kronfac.inverses.base import pack
from kronfac.layers import Layer, Matrices
from kronfac.refresh import Refresh, packed, unpacked
from kronfac.step_size import Experience

VERSION = 6


@dataclass(frozen=True)
class Kept:
    """What it takes to take the last step back: θ + δ − δ is not θ."""

    theta: Matrices
    """Where it started from."""
    momentum: Matrices | None
    """δ₀ that it was made with."""


@dataclass(frozen=True)
class LastStep:
    """A step that was taken and not yet judged by the next mini-batch."""

    cases: int
    """Of its mini-batch."""
    loss: float
    """On its own rows, before it, as the closure returned it."""
    penalty: float
    """η/2 ‖θ‖² before it."""
    predicted_change: float
    curvature_share: float
    kept: Kept | None
    """Where the next iteration will judge it."""


@dataclass(frozen=True)
class State:
    """The optimizer between two steps: a value, replaced as a whole when a step is committed."""

    iteration: int
    """Steps taken."""
    lambda_: float
    gamma: float
    generator: Tensor
    """State of the generator that targets are drawn with, bytes."""
    factors: KroneckerFactors | None = None
    inverse: DampedInverse | None = None
    """As of the last refresh."""
    inverse_iteration: int = 0
    """Of the last refresh."""
    inverse_lambda: float | None = None
    """λ at the last refresh."""
    refresh: Refresh | None = None
    """Under way in the background."""
    gamma_move: float = 0.0
    """Where the search for γ goes next, a logarithm."""
    previous_delta: Matrices | None = None
    """The last step, or once that has been judged what momentum goes on with."""
    remembered: Matrices | None = None
    """Of the steps so far what momentum goes on with, where that is not the last one."""
    last: LastStep | None = None
    judged_iteration: int = 0
    """Of the last step that was judged."""
    confirmed: float | None = None
    """Of what M predicted, the part that the next mini-batches saw come true, averaged."""
    noise: float | None = None
    """By how much the loss differs from one mini-batch to another at the same θ, averaged; of a summed
    loss per case."""
    average: Matrices | None = None
    """θ̄, of the iterates of late, where mini-batches are noisy."""
    average_start: int = 0
    """The iteration at which it began."""
    memory: float = math.inf
    """See `Experience`."""
    decayed: Matrices | None = None
    """η F̆⁻¹θ as of the last refresh, for the low-rank route [MG15 §8]."""

    @property
    def momentum(self) -> Matrices | None:
        """δ₀."""
        return self.previous_delta if self.remembered is None else self.remembered

    @property
    def confidence(self) -> float:
        """`confirmed`, and 1 where that is not known."""
        return 1.0 if self.confirmed is None else self.confirmed

    @property
    def experience(self) -> Experience:
        """For the next step."""
        return Experience(self.iteration + 1, self.confidence, self.memory)


def save(state: State, layers: Sequence[Layer], inverse: ApproximateInverse) -> dict[str, Any]:
    """A dictionary that `torch.load(weights_only=True)` reads back."""
    return {
        "version": VERSION,
        "layers": [layer.name for layer in layers],
        "inverse_settings": repr(inverse),
        **{f.name: pack(getattr(state, f.name)) for f in fields(state) if f.name != "refresh"},
        "refresh": state.refresh and packed(state.refresh),
    }


def load(
    saved: dict[str, Any], layers: Sequence[Layer], inverse: ApproximateInverse
) -> tuple[State, list[Layer]]:
    """The state, and the layers in the order that it was saved with.

    Raises:
        StateError: it is of another version, model or kind of inverse.
    """
    version = saved.get("version") if isinstance(saved, dict) else None
    if version != VERSION:
        raise StateError(f"This kronfac reads states of version {VERSION}; got {version!r}.")
    expected = {"layers", "inverse_settings", *(f.name for f in fields(State))}
    if missing := expected - saved.keys():
        raise StateError(f"The state is incomplete: it has no {sorted(missing)}.")
    by_name = {layer.name: layer for layer in layers}
    if sorted(by_name) != sorted(saved["layers"]):
        raise StateError(
            f"The state is of a model with layers {saved['layers']}; this one has {sorted(by_name)}."
        )
    ordered = [by_name[name] for name in saved["layers"]]
    if saved["inverse_settings"] != repr(inverse):
        raise StateError(
            f"The state was saved with {saved['inverse_settings']}; this KFAC has {inverse!r}."
        )
    device = ordered[0].parameters()[0].device

    def placed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().to(device)
        if isinstance(value, dict):
            return {key: placed(item) for key, item in value.items()}
        return tuple(placed(item) for item in value) if isinstance(value, (list, tuple)) else value

    factors = saved["factors"] and KroneckerFactors(**placed(saved["factors"]))
    if factors is not None:
        _check_shapes(factors, ordered)
    state = State(
        iteration=int(saved["iteration"]),
        lambda_=float(saved["lambda_"]),
        gamma=float(saved["gamma"]),
        generator=saved["generator"].clone().cpu(),
        factors=factors,
        inverse=saved["inverse"] and inverse.load(placed(saved["inverse"])),
        inverse_iteration=int(saved["inverse_iteration"]),
        inverse_lambda=saved["inverse_lambda"],
        refresh=saved["refresh"] and _refresh(placed(saved["refresh"]), inverse),
        gamma_move=float(saved["gamma_move"]),
        previous_delta=placed(saved["previous_delta"]),
        remembered=placed(saved["remembered"]),
        judged_iteration=int(saved["judged_iteration"]),
        confirmed=saved["confirmed"],
        noise=saved["noise"],
        average=placed(saved["average"]),
        average_start=int(saved["average_start"]),
        memory=float(saved["memory"]),
        last=saved["last"] and _last_step(placed(saved["last"])),
        decayed=placed(saved["decayed"]),
    )
    return state, ordered


def _refresh(packed: dict[str, Any], inverse: ApproximateInverse) -> Refresh:
    try:
        return unpacked(packed, inverse)
    except (KeyError, TypeError) as error:
        raise StateError(f"The state of the refresh is incomplete: {error}.") from error


def _last_step(packed: dict[str, Any]) -> LastStep:
    try:
        kept = packed["kept"] and Kept(**packed["kept"])
        return LastStep(**packed | {"kept": kept})
    except (KeyError, TypeError) as error:
        raise StateError(f"The state of the last step is incomplete: {error}.") from error


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


def seeded(seed: int, device: torch.device) -> Tensor:
    """The state of a new generator with this seed."""
    return torch.Generator(device=device).manual_seed(seed).get_state()
