"""Tensors of a subclass that has data of its own, such as names of columns, and computes as tensors do.

K-FAC's own passes compute with plain tensors wherever they can: what a class adds to methods such as `to`
and `clone` may depend on data that torch's functions do not pass on. A model gets what it was given.

Subclasses that are more than their numbers, such as DTensor, have a `__torch_dispatch__`, and stay.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kronfac.network.nested import map_leaves


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
        types: the subclasses among its arguments, as `__torch_function__` is told them.
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
