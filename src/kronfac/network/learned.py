"""What passes have shown of a network, which later ones go by; and the same as it is saved.

A resumed run has to go by what the first mini-batches have shown to the run before: others may show
something else, such as a parameter that only some of them use.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

import torch

from kronfac.curvature import (
    Curvature,
    DenseMoments,
    DiagonalMoments,
    KroneckerBlock,
    KroneckerSumMoments,
    Moments,
)
from kronfac.errors import StateError
from kronfac.network.blocks import Blocks, Kind
from kronfac.network.unit import Unit
from kronfac.ranges import Positive

Placement = Sequence[tuple[torch.dtype, torch.device]]
"""The dtype and the device of every parameter."""


@dataclass(frozen=True)
class Division:
    """Where the examples are in the arguments and in the terms."""

    every: bool = True
    """Whether all tensors of their number along the dimension have them there; else only the first has."""
    interleaved: bool = False
    """Whether term k N + n is of example n of N, as if sequences had time first; else the terms of an
    example stand together."""
    dim: int = 0
    """The dimension of the arguments that they are along."""


DIVISIONS = {
    "every": Division(),
    "first": Division(every=False),
    "every, interleaved": Division(interleaved=True),
    "every, second dimension": Division(dim=1),
    "every, second dimension, interleaved": Division(interleaved=True, dim=1),
}
"""By the name that a network remembers; what is not among them is used whole."""
WHOLE = "whole"


@dataclass
class Learned:
    """What passes have shown of a network: how mini-batches can be divided, and which engine works."""

    slicing: dict[object, str] = field(default_factory=dict)
    """The names of divisions, by the signatures of passes (`division.py`)."""
    loaded: dict[str, str] = field(default_factory=dict)
    """The same of an earlier run, by the hashes of signatures."""
    forward_mode: bool = True
    """False once a pass has had no forward-mode derivative, or a wrong one."""
    difference: float = 1.0
    """Length of finite differences, in units of the usual one."""
    compared: bool = False
    """Whether J v has been compared with Jᵀ r."""
    placement: Placement | None = None
    """Where the parameters were in the last step; None before there was one."""

    def copy(self) -> "Learned":
        """One that stays as it is."""
        return replace(self, slicing=dict(self.slicing))

    def division(self, signature: object) -> str | None:
        """How passes with this signature are divided; None if it was not tried out yet."""
        if signature not in self.slicing and self.loaded:
            found = self.loaded.get(_hash(signature))
            if found is not None:
                self.slicing[signature] = found
        return self.slicing.get(signature)


@dataclass(frozen=True)
class UnitState:
    """What the first pass has shown of a unit."""

    kind: str
    """See `Unit.kind`."""
    observed: bool


@dataclass(frozen=True)
class DivisionState:
    """How passes of one kind are divided into examples."""

    signature: str
    """Its hash."""
    name: str

    def __post_init__(self) -> None:
        if not re.fullmatch("[0-9a-f]{32}", self.signature):
            raise ValueError(f"its signature is not one: {self.signature!r}.")
        if self.name not in (*DIVISIONS, WHOLE):
            raise ValueError(f"there is no division {self.name!r}.")


@dataclass(frozen=True)
class LearnedState:
    """What passes have shown of a network, as it is saved."""

    forward_mode: bool
    difference: Positive
    compared: bool
    divisions: tuple[DivisionState, ...]
    units: tuple[UnitState, ...]
    """In their order; none before the first pass was looked at."""


def save_learned(learned: Learned, units: Sequence[Unit]) -> LearnedState:
    """What is saved of a network; `units` if their uses have been looked at."""
    named = learned.loaded | {_hash(key): name for key, name in learned.slicing.items()}
    return LearnedState(
        learned.forward_mode,
        learned.difference,
        learned.compared,
        tuple(DivisionState(signature, name) for signature, name in sorted(named.items())),
        tuple(UnitState(unit.kind, unit.observed) for unit in units),
    )


def load_learned(state: LearnedState) -> Learned:
    """What was saved, before the first pass of a resumed run."""
    loaded = {division.signature: division.name for division in state.divisions}
    return Learned(
        loaded=loaded,
        forward_mode=state.forward_mode,
        difference=state.difference,
        compared=state.compared,
    )


def load_unit(unit: Unit, state: UnitState, blocks: Blocks) -> Unit:
    """A unit with the block that it got in the first pass of the run that is resumed.

    Raises:
        StateError: there is no such kind of use.
    """
    unit = unit.undiscovered
    if not state.observed:
        return unit.unobserved("not all uses of it were seen when the state was saved")
    if not state.kind:
        return unit
    kinds: tuple[Kind, ...] = get_args(Kind)
    for kind in kinds:
        if kind == state.kind:
            block = blocks.choose(kind, *unit.shape)
            return replace(unit, block=block, kind=kind, original=unit)
    raise StateError(
        f"The state's kind of use of {unit.name!r} must be one of {kinds}; got {state.kind!r}. Load an "
        "earlier state."
    )


def check_moments(curvature: Curvature | None, units: Sequence[Unit]) -> None:
    """Check the kinds of a state's moments, which for some units are known after the first pass only.

    Raises:
        StateError: some are of another kind than the units' blocks estimate.
    """
    if curvature is None:
        return
    for unit, moments in zip(units, curvature.blocks, strict=True):
        if not isinstance(moments, _kinds(unit)):
            raise StateError(
                f"The state's statistics of {unit.name!r} are {type(moments).__name__}; this KFAC has "
                f"a {type(unit.block).__name__} for it. Use the block that it was saved with."
            )


def _kinds(unit: Unit) -> tuple[type[Moments], ...]:
    """The kinds of moments that a unit may have had: the first pass shows how it is used."""
    if not unit.observed or unit.kind:
        return (unit.block.moments,)
    if not unit.chosen:
        return (Moments,)
    # Diagonal ones if its uses were not all seen, a sum or a dense one if V and Vᵀ both were used.
    both = (KroneckerSumMoments, DenseMoments) if isinstance(unit.block, KroneckerBlock) else ()
    return (unit.block.moments, DiagonalMoments, *both)


def _hash(signature: object) -> str:
    """A short name of a signature, which is long: the same in every process."""
    return hashlib.sha256(repr(signature).encode()).hexdigest()[:32]
