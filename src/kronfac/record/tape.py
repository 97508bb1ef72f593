"""The tensors that recorded calls have computed, and operations between them, read from torch's graph.

A tensor is known for as long as the user's code holds on to it: weak references keep no graph and no
activations. Nodes of the graph know it too. In a loop without a closure nothing records the operations
between the model and the loss, such as `logits[:, :-1].reshape(-1, V)`. The nodes say which they were, as
long as each has one input that leads to the model, and only constants beside it.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kronfac.model.nested import Ref, map_leaves
from kronfac.record.batch import HALF, Function, Operation, Step

MOST = 32
"""Operations between the model and the loss that are followed."""
ALIAS = "AliasBackward0"
"""The node of what `as_subclass`, or the constructor of a class of tensors, makes of a tensor. Torch shows
these to no `TorchFunctionMode`."""
KEY = "kronfac"
"""Under which the nodes of the graph keep entries for the tensors that they have computed."""

new_key = count().__next__

Call = tuple[Function, tuple[Any, ...]]
"""A function and its arguments after the first one."""


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


def steps_of(records: Iterable[Record]) -> list[Step]:
    """The steps of several records, each once; a step comes after those that it depends on."""
    steps = {id(step): step for one in records for part in one.whole() for step in part.own}
    return sorted(steps.values(), key=lambda step: step.outputs[-1])


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of a tensor."""

    index: int
    version: int
    record: Record
    """The calls that have computed it."""


class Tape:
    """The tensors that one record has computed or was given, by their indices.

    A tensor that was written to is no longer known.

    Args:
        model: the model.
        indices: for tensors, in their order.
        key: the same for all tapes that know each other's tensors; None for none.
    """

    def __init__(self, model: nn.Module, indices: Iterator[int], key: int | None = None) -> None:
        self.record = Record()
        self.outside: dict[int, Tensor] = {}
        """Leaves that require a gradient and are not the model's, by id."""
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
                call = _read(node, number) if read else None
                if call is None:
                    return None
                calls.append(call)
            node, number = node.next_functions[0]
        return None

    def _replay(self, tensor: Tensor, start: Entry, calls: Sequence[Call]) -> Entry:
        """Know a tensor that these calls, of which the last was the first, have computed."""
        index, source = start.index, start.record
        for function, args in reversed(calls):
            if source.mixed and function is _cast and args[1] in (*HALF, torch.float32):
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


# ------------------------------------------------------------------------------- nodes of the graph


def _read(node: Any, number: int) -> Call | None:
    """The function that a node of the graph has computed; None if it can't be read."""
    inputs = node.next_functions
    if not inputs or any(other is not None for other, _ in inputs[1:]):
        return None
    name = node.name()
    try:
        if name in _READERS:
            return _READERS[name](node, number)
        if name in _BY_ARGUMENTS:
            function, *saved = _BY_ARGUMENTS[name]
            args = tuple(_argument(getattr(node, f"_saved_{key}")) for key in saved)
            return (_nth, (function, args, number)) if function in _SEVERAL else (function, args)
    except (AttributeError, RuntimeError):  # a saved tensor is gone, or has been written to
        pass
    return None


def _argument(saved: Any) -> Any:
    """An argument of a function, as its node has saved it."""
    if saved is None or (isinstance(saved, Tensor) and saved.requires_grad):
        raise AttributeError
    if isinstance(saved, Tensor):
        return saved.detach()
    if isinstance(saved, tuple):
        return tuple(map(_argument, saved))
    # Negative numbers are saved without their sign.
    return saved - 2**64 if type(saved) is int and saved >= 2**63 else saved


def _nth(tensor: Tensor, function: Function, args: tuple[Any, ...], number: int) -> Tensor:
    part: Tensor = function(tensor, *args)[number]
    return part


def _cast(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype)


def _read_view(node: Any, number: int) -> Call:
    shape = node._input_metadata[number].shape
    # The first dimension is open, so that it holds for some of the examples too.
    return torch.reshape, ((-1, *shape[1:]) if len(shape) else (),)


def _read_cast(node: Any, number: int) -> Call:
    made = node._input_metadata[number]
    return _cast, (made.device, made.dtype)


def _read_slice(node: Any, number: int) -> Call:
    bounds = slice(*map(_argument, (node._saved_start, node._saved_end, node._saved_step)))
    dim, whole = _argument(node._saved_dim), len(node._saved_self_sym_sizes)
    return operator.getitem, ((*(slice(None),) * (dim % whole), bounds),)


def _read_index(node: Any, number: int) -> Call:
    picked = (slice(None) if index is None else index for index in node._saved_indices)
    return operator.getitem, (tuple(picked),)


_READERS: dict[str, Callable[[Any, int], Call]] = {
    "ViewBackward0": _read_view,
    "UnsafeViewBackward0": _read_view,
    "ReshapeAliasBackward0": _read_view,
    "SliceBackward0": _read_slice,
    "IndexBackward0": _read_index,
    "ToCopyBackward0": _read_cast,
}
_BY_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "SelectBackward0": (torch.select, "dim", "index"),
    "TransposeBackward0": (torch.transpose, "dim0", "dim1"),
    "PermuteBackward0": (torch.permute, "dims"),
    "TBackward0": (torch.t,),
    "SqueezeBackward0": (torch.squeeze,),
    "SqueezeBackward1": (torch.squeeze, "dim"),
    "SqueezeBackward2": (torch.squeeze, "dim"),
    "UnsqueezeBackward0": (torch.unsqueeze, "dim"),
    "SplitBackward0": (torch.split, "split_size", "dim"),
    "UnbindBackward0": (torch.unbind, "dim"),
    "CloneBackward0": (torch.clone,),
    "MulBackward0": (torch.mul, "other"),
    "DivBackward0": (torch.div, "other"),
    "MeanBackward1": (torch.mean, "dim", "keepdim"),
    "SumBackward1": (torch.sum, "dim", "keepdim"),
    "LogSoftmaxBackward0": (torch.log_softmax, "dim"),
    "SoftmaxBackward0": (torch.softmax, "dim"),
    "SigmoidBackward0": (torch.sigmoid,),
    "TanhBackward0": (torch.tanh,),
    "ExpBackward0": (torch.exp,),
}
"""By the names of the graph's nodes: a function, and the names that its arguments are saved under."""
_SEVERAL = {torch.split, torch.unbind}
"""Functions with several results."""
