"""Tensors inside of other values (containers, dataclasses, objects of libraries), and of subclasses."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

DEPTH = 4
"""How many objects inside of each other are opened."""

_NUMBERS = frozenset({int, float, bool, str, type(None), slice, type(...), torch.dtype})
"""Types of what is inside of arguments and has nothing in it."""


@dataclass(frozen=True)
class Ref:
    """Stands for a tensor that an earlier step of the pass computes."""

    index: int


def map_leaves(value: Any, change: Callable[[Any], Any], depth: int = DEPTH) -> Any:
    """The value with `change` applied to its tensors and to everything else in it.

    Objects are copied if something in them changes; the value itself stays as it is.
    """
    # What is usual first: `tree_map` is slow.
    if isinstance(value, Tensor | Ref):
        return change(value)
    kind = type(value)
    if kind in _NUMBERS:
        return change(value)
    if kind is tuple:
        return tuple([map_leaves(item, change, depth) for item in value])
    if kind is dict:
        return {name: map_leaves(item, change, depth) for name, item in value.items()}

    def visit(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | Ref):
            return change(leaf)
        if isinstance(leaf, tuple) and leaf:  # such as a PackedSequence, which pytree does not know
            items = [map_leaves(item, change, depth - 1) for item in leaf]
            same = all(a is b for a, b in zip(items, leaf, strict=True))
            return leaf if same else tuple.__new__(type(leaf), items)
        inside = _data(leaf) if depth > 0 else {}
        if not inside:
            return change(leaf)
        mapped = {name: map_leaves(item, change, depth - 1) for name, item in inside.items()}
        changed = {name: item for name, item in mapped.items() if not _same(item, inside[name])}
        if not changed:
            return leaf
        return _copy(leaf, changed)

    return pytree.tree_map(visit, value)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in a value, in their order."""
    found: list[Tensor] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        return leaf

    map_leaves(value, note)
    return found


def tensor_leaves(value: Any) -> Iterator[Tensor]:
    """The tensors in containers, as pytree knows them; other objects are not opened."""
    kind = type(value)
    if isinstance(value, Tensor):
        yield value
    elif kind is tuple or kind is list:
        for item in value:
            yield from tensor_leaves(item)
    elif kind is dict:
        yield from tensor_leaves(list(value.values()))
    elif kind not in _NUMBERS:
        yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


def refs_of(value: Any) -> list[int]:
    """The indices of the references in a value."""
    found: list[int] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            found.append(leaf.index)
        return leaf

    map_leaves(value, note)
    return found


def fill(given: Any, values: Mapping[int, Tensor]) -> Any:
    """Arguments with tensors in the places of their references."""
    return map_leaves(given, lambda leaf: values[leaf.index] if isinstance(leaf, Ref) else leaf)


def _copy(value: Any, changed: dict[Any, Any]) -> Any:
    """An object with other data in it, made by none of its own methods: they may do anything."""
    kind: Any = type(value)
    result = kind.__new__(kind)
    if isinstance(value, dict):
        base: Any = OrderedDict if isinstance(value, OrderedDict) else dict
        for name, item in base.items(value):
            base.__setitem__(result, name, changed.get(name, item))
    for name, item in _own(value).items():
        _own(result)[name] = changed.get(name, item)
    return result


def _data(leaf: Any) -> dict[Any, Any]:
    """What an object that carries data consists of; nothing for modules, functions and types."""
    if isinstance(leaf, nn.Module | type) or (callable(leaf) and not is_dataclass(leaf)):
        return {}
    items = dict(dict.items(leaf)) if isinstance(leaf, dict) else {}
    return {**_own(leaf), **items}


def _own(leaf: Any) -> dict[str, Any]:
    """An object's attributes."""
    own = getattr(leaf, "__dict__", None)
    return own if type(own) is dict else {}


def _same(new: Any, old: Any) -> bool:
    """Whether nothing in a value was replaced; containers are built anew in any case."""
    if new is old:
        return True
    pairs = zip(_flat(new), _flat(old), strict=True)
    return all(a is b for a, b in pairs)


def _flat(value: Any) -> Iterator[Any]:
    return iter(pytree.tree_leaves(value))


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
