"""Operations between the model and the loss, read from the nodes of torch's graph.

In a loop without a closure nothing records operations such as `logits[:, :-1].reshape(-1, V)`. The nodes
say which they were, as long as each has one input that leads to the model, and only constants beside it.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kronfac.record.batch import Function

Call = tuple[Function, tuple[Any, ...]]
"""A function and its arguments after the first one."""
ALIAS = "AliasBackward0"
"""The node of what `as_subclass`, or the constructor of a class of tensors, makes of a tensor. Torch shows
these to no `TorchFunctionMode`."""


def read_node(node: Any, number: int) -> Call | None:
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


def cast(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Cast a tensor, as `Tensor.to` does."""
    return tensor.to(device, dtype)


def _read_view(node: Any, number: int) -> Call:
    shape = node._input_metadata[number].shape
    # The first dimension is open, so that it holds for some of the examples too.
    return torch.reshape, ((-1, *shape[1:]) if len(shape) else (),)


def _read_cast(node: Any, number: int) -> Call:
    made = node._input_metadata[number]
    return cast, (made.device, made.dtype)


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
