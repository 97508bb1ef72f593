"""Tensors inside of other values (containers, tuples of any class, dataclasses), and of subclasses."""

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

T = TypeVar("T")

_NUMBERS = frozenset({int, float, bool, str, type(None), slice, type(...), torch.dtype})
"""Types of what is inside of arguments and has nothing in it."""


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor that an earlier step of the pass computes."""

    index: int


def map_leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with `change` applied to its tensors and to everything else in it."""
    # What is usual first: `tree_map` is slow.
    if isinstance(value, Tensor | Ref):
        return change(value)
    kind = type(value)
    if kind in _NUMBERS:
        return change(value)
    if kind is tuple or kind is list:
        return kind([map_leaves(item, change) for item in value])
    if kind is dict:
        return {name: map_leaves(item, change) for name, item in value.items()}

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | Ref):
            return change(leaf)
        if isinstance(leaf, tuple) and leaf:  # such as a PackedSequence, which pytree does not know
            return tuple.__new__(type(leaf), [map_leaves(item, change) for item in leaf])
        if is_dataclass(leaf) and not isinstance(leaf, type | nn.Module):
            result = copy(leaf)
            for f in fields(leaf):
                item = map_leaves(getattr(leaf, f.name), change)
                object.__setattr__(result, f.name, item)
            return result
        return change(leaf)

    return pytree.tree_map(visit, value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, in their order."""
    return _leaves(value, Tensor)


def refs_of(value: Any) -> list[int]:
    """The indices of the references in a value."""
    return [ref.index for ref in _leaves(value, Ref)]


def _leaves(value: Any, kind: type[T]) -> list[T]:
    found: list[T] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, kind):
            found.append(leaf)
        return leaf

    map_leaves(value, note)
    return found


def fill(given: Any, values: Mapping[int, Tensor]) -> Any:
    """Arguments with tensors in the places of their references."""
    return map_leaves(given, lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf)


# ------------------------------------------------------------------------------------ tensor subclasses
#
# K-FAC's own passes compute with plain tensors wherever they can: what a subclass adds to methods such as
# `to` and `clone` may depend on data that torch's functions do not pass on, such as names of columns. A
# model gets what it was given. Subclasses that are more than their numbers, such as DTensor, have a
# `__torch_dispatch__`, and stay.


def as_plain(leaf: Any) -> Any:
    """A tensor of a subclass as a plain one; anything else as it is, parameters too."""
    if type(leaf) is Tensor or not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter):
        return leaf
    return leaf.as_subclass(Tensor) if _computes_as_usual(type(leaf)) else leaf


def call_plainly(
    function: Callable[..., Any], types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a function with plain tensors; results are in the class of its arguments, as torch has it.

    Args:
        function: what is called.
        types: the subclasses among its arguments, as `__torch_function__` receives them.
        args: its arguments.
        kwargs: further ones.
    """
    kind: Any = next(filter(_computes_as_usual, types), None)
    if kind is None:
        return function(*args, **kwargs)
    args, kwargs = map_leaves((args, kwargs), as_plain)
    result = function(*args, **kwargs)
    return map_leaves(result, lambda x: x.as_subclass(kind) if type(x) is Tensor else x)


def keep_attributes(part: Tensor, whole: Tensor) -> Tensor:
    """Some examples of a tensor, with the attributes that its class has given the whole."""
    if type(whole) is not Tensor and type(part) is type(whole):
        vars(part).update(vars(whole))
    return part


def _computes_as_usual(kind: Any) -> bool:
    return bool(kind.__torch_dispatch__ is Tensor.__torch_dispatch__)
