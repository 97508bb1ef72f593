"""What recorded calls have computed, and the mini-batch that they make.

A tensor is known for as long as the user's code holds on to it: weak references keep no graph and no
activations. Nodes of the graph know it too: in a loop without a closure, operations between the model and
the loss are read from them (`graph.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kronfac.errors import KronfacError, UnsupportedLossError
from kronfac.model.nested import Ref, map_leaves, refs_of
from kronfac.objective import Objective
from kronfac.record.batch import HALF, Batch, LossCall, ModelCall, Operation, Pass, Step
from kronfac.record.graph import ALIAS, Call, cast, read_node

MOST = 32
"""Operations between the model and the loss that are followed."""
KEY = "kronfac"
"""Under which the nodes of the graph keep entries for the tensors that they have computed."""

new_key = count().__next__


@dataclass(eq=False)
class Record:
    """What a closure did; in a loop, one call of the model or the loss."""

    own: list[Step] = field(default_factory=list)
    sources: list["Record"] = field(default_factory=list)
    """Earlier ones whose tensors it was given."""
    versions: list[tuple[Tensor, int]] = field(default_factory=list)
    """Tensors that the steps were given, with their versions at that time."""
    mixed: bool = False
    """Whether the steps ran in half precision."""
    read: bool = False
    """Whether a loss of the outputs was recorded."""

    def whole(self) -> list["Record"]:
        """This one after those that it depends on."""
        return [*(one for source in self.sources for one in source.whole()), self]


@dataclass(eq=False)
class SeenLoss:
    """A loss call, and the steps that lead to it."""

    call: LossCall
    """With its value, but None if the outputs were declared with `kronfac.observe`."""
    number: int
    """Its place among other losses."""
    record: Record
    outside: dict[int, torch.Size] = field(default_factory=dict)
    """Shapes, by id, of leaves that it depends on, that require a gradient and are not the model's."""

    def with_factor(self, arrived: Tensor | None) -> LossCall | None:
        """The call with its factor in the objective: the gradient that arrived at it; None if none did."""
        value = self.call.value
        if value is None:
            return self.call
        if arrived is None:
            return None
        factor: float | Tensor = arrived
        if not arrived.is_cuda:
            least = float(arrived.min())
            if arrived.dim() == 0:
                factor = least
            if least < 0:
                raise UnsupportedLossError(
                    "KFAC needs losses that are minimised; one of those that were called enters "
                    f"the objective with the factor {least:g}, which has no positive curvature. Leave it "
                    "out, or declare the terms that are minimised with kronfac.observe."
                )
        terms = self.call.terms
        # A loss without a reduction: the gradient at each element is its weight.
        own = terms.weighed_by(arrived) if arrived.dim() else terms.scaled(factor)
        return replace(self.call, terms=own, value=(value * arrived).sum(), factor=factor)


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a tensor."""

    index: int
    version: int
    record: Record
    """The calls that have computed it."""


class Tape:
    """Numbers the tensors that one record has received or computed.

    It forgets tensors that were written to.

    Args:
        model: the model.
        indices: for tensors, in their order.
        key: shared by tapes that may refer to each other's tensors; None if there are no others.
    """

    def __init__(self, model: nn.Module, indices: Iterator[int], key: int | None = None) -> None:
        self.record = Record()
        self.outside: dict[int, Tensor] = {}
        """Leaves that require a gradient and are not the model's, by id."""
        self.unread = ""
        """A node of the graph that could not be read."""
        self._indices = indices
        self._key = new_key() if key is None else key
        self._trained = {id(p) for p in model.parameters() if p.requires_grad}
        self._known: Any = WeakTensorKeyDictionary()

    def remember(self, tensor: Tensor, index: int | None = None) -> int:
        """Know a tensor from now on, by a new index unless one is given."""
        entry = Entry(next(self._indices) if index is None else index, tensor._version, self.record)
        self._known[tensor] = entry
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata.setdefault(KEY, {})[self._key, tensor.output_nr] = entry
        return entry.index

    def index(self, leaf: Any, read: bool = False) -> int | None:
        """The index of a tensor; None if it is not known, or was written to since.

        With `read`, operations that lead to it from a known tensor are read from the graph, and recorded.
        """
        if not isinstance(leaf, Tensor):
            return None
        entry = self._known.get(leaf) or self._trace_back(leaf, read)
        return None if entry is None or entry.version != leaf._version else entry.index

    def _trace_back(self, tensor: Tensor, read: bool) -> Entry | None:
        with torch._C.DisableTorchFunction():  # a class may have a `grad_fn` of its own
            node: Any = tensor.grad_fn
            number = tensor.output_nr
        calls: list[Call] = []
        for _ in range(MOST):
            if node is None:
                return None
            start = node.metadata.get(KEY, {}).get((self._key, number))
            if start is not None:
                return self._replay(tensor, start, calls)
            if node.name() != ALIAS:
                call = read_node(node, number) if read else None
                if call is None:
                    self.unread = node.name()
                    return None
                calls.append(call)
            node, number = node.next_functions[0]
        return None

    def _replay(self, tensor: Tensor, start: Entry, calls: Sequence[Call]) -> Entry:
        """Know a tensor that these calls, of which the last was the first, have computed."""
        index, source = start.index, start.record
        for function, args in reversed(calls):
            if source.mixed and function is cast and args[1] in (*HALF, torch.float32):
                continue  # in K-FAC's own passes there is no half precision to cast from
            given, index = index, next(self._indices)
            self.record.own.append(Operation(function, (Ref(given), *args), {}, (index,)))
        if source is not self.record and source not in self.record.sources:
            self.record.sources.append(source)
        version = tensor._version if calls else start.version
        self._known[tensor] = entry = Entry(index, version, self.record)
        return entry

    def references(self, given: Any) -> tuple[Any, bool, bool]:
        """Arguments with references to known tensors; whether there is any, or a trained parameter."""
        known = trained = False

        def put(leaf: Any) -> Any:
            nonlocal known, trained
            index = self.index(leaf)
            if index is None:
                trained = trained or id(leaf) in self._trained
                return leaf
            known = True
            return Ref(index)

        return map_leaves(given, put), known, trained

    def lost(self, tensors: Sequence[Tensor]) -> bool:
        """Whether one of these tensors was computed from trained parameters by something unknown.

        Leaves outside the model that they were computed from are noted.
        """
        unknown = [t for t in tensors if self.index(t) is None]
        leaves = [t for t in unknown if t.requires_grad and t.is_leaf]
        visited: set[Any] = set()
        stack: list[Any] = [t.grad_fn for t in unknown]
        lost = False
        while stack and not lost:
            node = stack.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            leaf = getattr(node, "variable", None)
            lost = id(leaf) in self._trained
            if leaf is not None:
                leaves.append(leaf)
            stack.extend(parent for parent, _ in node.next_functions)
        self.outside.update({id(t): t for t in leaves if id(t) not in self._trained})
        return lost


# ---------------------------------------------------------------------------------------- assembly


def assemble(
    losses: Mapping[SeenLoss, Tensor | None],
    others: Sequence[Record],
    objective: Objective,
    changed: KronfacError,
) -> Batch | None:
    """The mini-batch of loss calls; without any, the calls of the model with the loss given to KFAC.

    Args:
        losses: with the gradients that arrived at them.
        others: calls of the model, which count if there are no losses.
        objective: the loss that KFAC was given.
        changed: the error to raise if inputs or targets were written to since.

    Returns:
        None if there is neither.
    """
    seen = sorted(losses, key=lambda one: one.number)
    records = [one.record for one in seen] or others
    versions = (pair for one in records for part in one.whole() for pair in part.versions)
    if any(tensor._version != version for tensor, version in versions):
        raise changed
    steps = _steps_of(records)
    if not steps:
        return None
    mixed = any(one.mixed for one in records)
    calls = [call for one in seen if (call := one.with_factor(losses[one])) is not None]
    if not calls:
        return Batch(_declare(steps, objective), seen=False, assumed=True, mixed=mixed)
    complete = all(call.function is not None for call in calls)
    outside = {key: shape for one in seen for key, shape in one.outside.items()}
    return Batch(_group(steps, calls), complete, mixed=mixed, outside=tuple(outside.values()))


def _group(steps: Sequence[Step], losses: Sequence[LossCall]) -> tuple[Pass, ...]:
    """One pass for every set of loss calls that share a call of the model."""
    producers = _producers(steps)
    passes: list[tuple[set[int], list[LossCall]]] = []
    for loss in losses:
        needed, together = _needed(steps, [loss.input], producers), [loss]
        for other in [p for p in passes if p[0] & needed]:
            passes.remove(other)
            needed, together = needed | other[0], other[1] + together
        passes.append((needed, together))
    return tuple(
        Pass(tuple(steps[n] for n in sorted(needed)), tuple(together))
        for needed, together in passes
    )


def _declare(steps: Sequence[Step], objective: Objective) -> tuple[Pass, ...]:
    """Passes whose loss was not recorded: the curvature of KFAC's loss at the model's outputs.

    If parts of the model were called, at the outputs of those that no other part uses.
    """
    producers = _producers(steps)
    calls = {n: step for n, step in enumerate(steps) if isinstance(step, ModelCall)}
    sources = {n: _needed(steps, refs_of((c.args, c.kwargs)), producers) for n, c in calls.items()}
    passes = []
    for n, call in calls.items():
        if any(n in others for others in sources.values()):
            continue
        # A number is no prediction: models that compute their own loss return it first.
        outputs = list(zip(call.outputs, call.shapes, strict=True))
        prediction, shape = next((pair for pair in outputs if len(pair[1])), outputs[0])
        own = tuple(steps[i] for i in sorted({n} | sources[n]))
        passes.append(Pass(own, (LossCall(prediction, objective.declare(shape)),)))
    if not objective.mean:
        return tuple(passes)
    # Each call is a micro-batch of the same objective.
    total = sum(part.examples for part in passes)
    return tuple(
        Pass(part.steps, (part.losses[0].scaled(part.examples / total),)) for part in passes
    )


def _steps_of(records: Iterable[Record]) -> list[Step]:
    """The steps of several records, each once; a step comes after those that it depends on."""
    steps = {id(step): step for one in records for part in one.whole() for step in part.own}
    return sorted(steps.values(), key=lambda step: step.outputs[-1])


def _producers(steps: Sequence[Step]) -> dict[int, int]:
    """For the index of every tensor, the number of the step that computes it."""
    return {
        index: n
        for n, step in enumerate(steps)
        for index in step.outputs + (step.losses if isinstance(step, ModelCall) else ())
    }


def _needed(steps: Sequence[Step], wanted: Iterable[int], producers: dict[int, int]) -> set[int]:
    """The numbers of the steps that compute these tensors."""
    needed: set[int] = set()
    stack = list(wanted)
    while stack:
        number = producers[stack.pop()]
        if number not in needed:
            needed.add(number)
            stack += refs_of((steps[number].args, steps[number].kwargs))
    return needed
