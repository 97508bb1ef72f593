"""Operations between the model's outputs and a loss call, read from torch's graph.

In a loop without a closure nothing records the operations between the model and the loss, such as
`logits[:, :-1].reshape(-1, V)`. The nodes of the graph say which they were, as long as each has one
input that leads to the model, and only constants beside it.
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
"""Operations between the model and the loss that are followed."""

Call = tuple[Function, tuple[Any, ...]]
"""A function and its arguments after the first one."""


@dataclass(frozen=True)
class Known:
    """The origin of a tensor that a node of the graph has computed."""

    index: int
    record: Record
    """The calls that computed it."""


@dataclass(frozen=True)
class Found:
    """How a tensor was computed from one that is known."""

    start: Known
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
        tensor: an argument of the model or the loss.
        known: the origin of an output of a node of the graph, if it is known.
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
            for function, args in reversed(calls):
                if start.record.mixed and function is _cast and args[1] in (*HALF, torch.float32):
                    continue  # in K-FAC's own passes there is no half precision to cast from
                given, index = index, next(indices)
                operations.append(Operation(function, (Ref(given), *args), {}, (index,)))
            return Found(start, operations, index)
        call = _read(node, number)
        if call is None:
            return None
        calls.append(call)
        node, number = node.next_functions[0]
    return None


def _read(node: Any, number: int) -> Call | None:
    """The function that a node of the graph has computed."""
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
    "AliasBackward0": (torch.clone,),
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
