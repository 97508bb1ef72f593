"""Where tensors on the way through a network have the examples, by how they were made.

Sizes alone do not tell: (2 N, …) are two places of every example, or two views of all of them after one
another, as `torch.cat([a, b])` makes them; (N, …) are the examples, or a table of N positions. A tensor
that came from such a function is followed through what is computed from it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kronfac.network.by_example import Order

Function = Callable[..., Any]

_JOINS = {torch.cat, torch.concat, torch.concatenate}
_REPEATS = {Tensor.repeat, torch.tile, Tensor.tile}
_EXPANDS = {Tensor.expand, torch.broadcast_to, Tensor.broadcast_to}
_TURNS = {
    *(torch.transpose, Tensor.transpose, torch.permute, Tensor.permute, torch.movedim),
    *(Tensor.movedim, torch.swapaxes, Tensor.swapaxes, torch.swapdims, Tensor.swapdims),
}


class Orders:
    """The orders of tensors that sizes do not tell.

    Args:
        examples: of the pass.
        usual: the order of all other tensors.
        tables: tensors that no example enters, such as numbers of positions that a model keeps.
    """

    def __init__(self, examples: int, usual: Order, tables: Iterable[Tensor]) -> None:
        self._examples, self._usual = examples, usual
        # With the tensors themselves, so that no other gets the id of one that is gone.
        self._known = {id(tensor): (tensor, Order.NONE) for tensor in tables}
        self._sizes: dict[int, int] = {}
        """Rows of tensors with views, by their ids: views · examples."""
        self._stacked: dict[int, Tensor] = {}
        """Tensors (views, examples, …)."""

    def call(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Order:
        """The order of what a function computes."""
        if func is torch.arange:
            return Order.NONE
        if self._examples > 1 and self._usual == Order.FIRST and self._joins(func, args, kwargs):
            return Order.VIEWS
        if not (self._known or self._stacked):
            return self._usual
        given = list(_tensors((*args, *kwargs.values())))
        orders = {self._of(tensor) for tensor in given if not isinstance(tensor, nn.Parameter)}
        if Order.VIEWS in orders or any(id(tensor) in self._stacked for tensor in given):
            return Order.VIEWS
        return Order.NONE if orders == {Order.NONE} else self._usual

    def note(self, func: Function, args: Sequence[Any], order: Order, result: Any) -> None:
        """Remember the order of what a function has computed."""
        if order == self._usual:
            return
        given = list(_tensors(args))
        for tensor in _tensors((result,)):
            if order == Order.NONE:
                # What is repeated may be so for every example.
                if func not in _REPEATS | _EXPANDS:
                    self._known[id(tensor)] = tensor, order
            elif func is torch.stack or (self._is_stack(given) and self._keeps(func, tensor)):
                self._stacked[id(tensor)] = tensor
            elif (size := self._size(func, given, tensor)) is not None:
                self._known[id(tensor)] = tensor, order
                self._sizes[id(tensor)] = size

    def is_table(self, tensor: Tensor) -> bool:
        """Whether no example enters a tensor."""
        return self._of(tensor) == Order.NONE

    def _of(self, tensor: Tensor) -> Order:
        return self._known.get(id(tensor), (tensor, self._usual))[1]

    def _is_stack(self, given: Sequence[Tensor]) -> bool:
        return any(id(tensor) in self._stacked for tensor in given)

    def _keeps(self, func: Function, tensor: Tensor) -> bool:
        """Whether what was computed from (views, examples, …) is that too."""
        shape = tensor.shape[:2]
        return func not in _TURNS and any(shape == t.shape[:2] for t in self._stacked.values())

    def _size(self, func: Function, given: Sequence[Tensor], tensor: Tensor) -> int | None:
        """views · examples, if that is a dimension of what was computed from them."""
        if func in _JOINS | _REPEATS:
            return len(tensor)
        sizes = [self._sizes[id(t)] for t in given if id(t) in self._sizes]
        sizes += [t.shape[0] * t.shape[1] for t in given if id(t) in self._stacked]
        # A function that is given time first has them in the second dimension.
        return next((size for size in sizes if size in tensor.shape[:2]), None)

    def _joins(self, func: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a function puts views of all examples after one another."""
        if func in _REPEATS:
            x, *_ = args
            return self._has_all(x) and not isinstance(x, nn.Parameter)
        if func not in _JOINS and func is not torch.stack:
            return False
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        tensors = list(_tensors((args[0] if args else kwargs.get("tensors"),)))
        plain = not any(isinstance(tensor, nn.Parameter) for tensor in tensors)
        return dim == 0 and len(tensors) > 1 and plain and all(map(self._has_all, tensors))

    def _has_all(self, tensor: Tensor) -> bool:
        """Whether the examples are the rows of a tensor, once or in several views."""
        order = self._of(tensor)
        own = order == self._usual and tensor.dim() > 0 and len(tensor) == self._examples
        return own or order == Order.VIEWS


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
