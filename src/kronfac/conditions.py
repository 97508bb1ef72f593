"""Things about a mini-batch or a network that a step copes with, and that are worth a word when they begin.

Nothing here changes a step: what is done about each is said in docs/failures.md.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kronfac.curvature import Curvature, KroneckerMoments
from kronfac.evaluation import Evaluation
from kronfac.network import Network, Unit
from kronfac.report import Event, EventKind, StepReport
from kronfac.state import State

Found = dict[EventKind, str]


class Conditions:
    """Says what is out of the ordinary when that begins or changes, and not in every step."""

    def __init__(self) -> None:
        self._told: Found = {}
        self._left: list[tuple[int, int]] | None = None

    def leave(self, network: Network) -> None:
        """Note how a step leaves the parameters."""
        self._left = _marks(network)

    def forget(self) -> None:
        """Parameters may be anything: a state was loaded."""
        self._left = None

    def changed(self, network: Network) -> bool:
        """Whether somebody has written to the parameters, or replaced their memory, since then.

        What `p.data` was written to with leaves no mark.
        """
        return self._left is not None and self._left != _marks(network)

    def notes(
        self, evaluation: Evaluation, state: State, report: StepReport, changed: bool
    ) -> tuple[Event, ...]:
        """What is to be said after a step that was taken."""
        units = evaluation.network.units
        refreshed = state.current is not None and state.current.iteration == state.iteration
        found: Found = {}
        if idle := [units[n].name for n in sorted(evaluation.without_gradient)]:
            found[EventKind.NO_DATA] = (
                f"No gradient came to {_list(idle)}: statistics and parameters stay, but for momentum."
            )
        if evaluation.batch.examples == 1:
            found[EventKind.BATCH_OF_ONE] = (
                "The mini-batch has one example: its statistics have rank one, and damping does the rest."
            )
        if report.predicted_change == 0 and _no_gradient(evaluation):
            found[EventKind.ZERO_GRADIENT] = (
                "All gradients are zero: there is no direction to go in."
            )
        if changed:
            found[EventKind.PARAMETERS_CHANGED] = (
                "Parameters were written to since the last step. Statistics and momentum stay; a step that "
                "is rejected is subtracted, not overwritten."
            )
        seen = (EventKind.DEAD_UNITS, EventKind.CONSTANT_INPUTS)
        if refreshed and state.curvature is not None:
            found |= _singular(units, state.curvature)
        else:
            found |= {kind: self._told[kind] for kind in seen if kind in self._told}
        new = {kind: text for kind, text in found.items() if self._told.get(kind) != text}
        self._told = found
        return tuple(Event(kind, text) for kind, text in new.items())


def _marks(network: Network) -> list[tuple[int, int]]:
    return [(p.data_ptr(), p._version) for p in network.parameters]


def _no_gradient(evaluation: Evaluation) -> bool:
    grads = [p.grad for p in evaluation.network.parameters]
    return all(g is None or not bool(g.any()) for g in grads)


def _singular(units: Sequence[Unit], curvature: Curvature) -> Found:
    """Outputs that no gradient comes to, and inputs that do not vary, in Kronecker blocks."""
    dead, constant = [], []
    for unit, block in zip(units, curvature.blocks, strict=True):
        if not isinstance(block, KroneckerMoments):
            continue
        A, G = block.A, block.G
        d_A, d_G = (M if M.dim() == 1 else M.diagonal() for M in (A, G))
        still = d_A == 0
        if (
            A.dim() == 2 and len(unit.parameters) == 2
        ):  # a bias, whose input is 1, in the last column
            mean = A[:, -1]
            variance = d_A - mean.square()
            still = still | (variance <= len(A) * torch.finfo(A.dtype).eps * d_A)
            still = still[:-1]
        counts = _counts(d_G == 0, still)
        if counts[0] > 0:
            dead.append(f"{counts[0]} of {len(d_G)} in {unit.name!r}")
        if counts[1] > 0:
            constant.append(f"{counts[1]} of {len(still)} in {unit.name!r}")
    found: Found = {}
    if dead:
        found[EventKind.DEAD_UNITS] = f"Outputs that no gradient comes to: {'; '.join(dead)}."
    if constant:
        found[EventKind.CONSTANT_INPUTS] = f"Inputs that do not vary: {'; '.join(constant)}."
    return found


def _counts(*masks: Tensor) -> list[int]:
    """How many are true, asked once."""
    counted: list[int] = torch.stack([mask.sum() for mask in masks]).tolist()
    return counted


def _list(names: list[str]) -> str:
    return ", ".join(map(repr, names))
