"""What was done to the model's outputs before a loss was called with them, read from torch's graph.

In a loop without a closure nobody watches the operations between the model and the loss, such as
`logits[:, :-1].reshape(-1, V)`. But the nodes of the graph say which they were, as long as each has one
input that leads to the model and nothing else that is not known.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kronfac.model.nested import Ref
from kronfac.record.batch import HALF, Function, Operation
from kronfac.record.losses import Record

MOST = 32
"""Operations between the model and the loss that are looked through."""

Call = tuple[Function, tuple[Any, ...], dict[str, Any]]
"""A function and its arguments after the first one."""


@dataclass(frozen=True)
class Known:
    """What is known of a tensor that a node of the graph has computed."""

    index: int
    record: Record
    """The calls that computed it."""


@dataclass(frozen=True)
class Found:
    """How a tensor was computed from one that is known."""

    start: Known
    """What is known of that one."""
    operations: list[Operation]
    index: int
    """The index of the tensor itself."""


def trace_back(
    tensor: Tensor,
    known: Callable[[Any, int], Known | None],
    indices: Iterator[int],
) -> Found | None:
    """Operations that lead from a known tensor to this one; None if there is one that can't be read.

    Args:
        tensor: what a loss is called with.
        known: what is known of an output of a node of the graph, if anything is.
        indices: for tensors in between.
    """
    node, number = tensor.grad_fn, tensor.output_nr
    calls: list[Call] = []
    for _ in range(MOST):
        if node is None:
            return None
        start = known(node, number)
        if start is not None:
            index, operations = start.index, []
            for function, args, kwargs in reversed(calls):
                if start.record.mixed and function is _cast and args[1] in (*HALF, torch.float32):
                    continue  # in K-FAC's own passes there is no half precision to come from
                given, index = index, next(indices)
                operations.append(Operation(function, (Ref(given), *args), kwargs, (index,)))
            return Found(start, operations, index)
        call = _read(node, number)
        if call is None:
            return None
        calls.append(call)
        node, number = node.next_functions[0]
    return None


def _read(node: Any, number: int) -> Call | None:
    """What a node of the graph has computed."""
    inputs = node.next_functions
    reader = _READERS.get(node.name())
    if reader is None or not inputs or any(other is not None for other, _ in inputs[1:]):
        return None
    try:
        return reader(node, number)
    except (AttributeError, RuntimeError):  # what it saved is gone, or has been written to
        return None


def _cast(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype)


def _nth(tensor: Tensor, function: Function, args: tuple[Any, ...], number: int) -> Tensor:
    part: Tensor = function(tensor, *args)[number]
    return part


def _int(value: int) -> int:
    """Negative numbers come without their sign."""
    return value - 2**64 if value >= 2**63 else value


def _view(node: Any, number: int) -> Call:
    shape = node._input_metadata[number].shape
    # The first dimension is open, so that it holds for some of the examples too.
    return torch.reshape, ((-1, *shape[1:]) if len(shape) else (),), {}


def _to(node: Any, number: int) -> Call:
    made = node._input_metadata[number]
    return _cast, (made.device, made.dtype), {}


def _slice(node: Any, number: int) -> Call:
    bounds = _int(node._saved_start), _int(node._saved_end), node._saved_step
    dim, whole = _int(node._saved_dim), len(node._saved_self_sym_sizes)
    before = (slice(None),) * (dim % whole)
    return operator.getitem, ((*before, slice(*bounds)),), {}


def _index(node: Any, number: int) -> Call:
    picked = (slice(None) if index is None else index for index in node._saved_indices)
    return operator.getitem, (tuple(picked),), {}


def _by_dim(function: Function, *names: str) -> Callable[[Any, int], Call]:
    """Reader of a function that is given dimensions, by the names that a node has them under."""

    def read(node: Any, number: int) -> Call:
        values = (getattr(node, f"_saved_{name}") for name in names)
        return (
            function,
            tuple(tuple(map(_int, v)) if isinstance(v, tuple) else _int(v) for v in values),
            {},
        )

    return read


def _part_of(function: Function, *names: str) -> Callable[[Any, int], Call]:
    """Reader of a function with several results."""

    def read(node: Any, number: int) -> Call:
        args = tuple(_int(getattr(node, f"_saved_{name}")) for name in names)
        return _nth, (function, args, number), {}

    return read


def _reduction(function: Function) -> Callable[[Any, int], Call]:
    def read(node: Any, number: int) -> Call:
        return function, (tuple(map(_int, node._saved_dim)), node._saved_keepdim), {}

    return read


def _with_other(function: Function) -> Callable[[Any, int], Call]:
    def read(node: Any, number: int) -> Call:
        other = node._saved_other
        if not isinstance(other, Tensor) or other.requires_grad:
            raise AttributeError
        return function, (other.detach(),), {}

    return read


def _plain(function: Function) -> Callable[[Any, int], Call]:
    return lambda node, number: (function, (), {})


_READERS: dict[str, Callable[[Any, int], Call]] = {
    "ViewBackward0": _view,
    "UnsafeViewBackward0": _view,
    "ReshapeAliasBackward0": _view,
    "SliceBackward0": _slice,
    "SelectBackward0": _by_dim(torch.select, "dim", "index"),
    "IndexBackward0": _index,
    "TransposeBackward0": _by_dim(torch.transpose, "dim0", "dim1"),
    "PermuteBackward0": _by_dim(torch.permute, "dims"),
    "TBackward0": _plain(torch.t),
    "SqueezeBackward0": _plain(torch.squeeze),
    "SqueezeBackward1": _by_dim(torch.squeeze, "dim"),
    "SqueezeBackward2": _by_dim(torch.squeeze, "dim"),
    "UnsqueezeBackward0": _by_dim(torch.unsqueeze, "dim"),
    "SplitBackward0": _part_of(torch.split, "split_size", "dim"),
    "UnbindBackward0": _part_of(torch.unbind, "dim"),
    "CloneBackward0": _plain(torch.clone),
    "AliasBackward0": _plain(torch.clone),
    "ToCopyBackward0": _to,
    "MulBackward0": _with_other(torch.mul),
    "DivBackward0": _with_other(torch.div),
    "MeanBackward1": _reduction(torch.mean),
    "SumBackward1": _reduction(torch.sum),
    "LogSoftmaxBackward0": _by_dim(torch.log_softmax, "dim"),
    "SoftmaxBackward0": _by_dim(torch.softmax, "dim"),
    "SigmoidBackward0": _plain(torch.sigmoid),
    "TanhBackward0": _plain(torch.tanh),
    "ExpBackward0": _plain(torch.exp),
}
"""By the names of the graph's nodes."""
