"""The tensors that recorded steps have computed, by their indices on the tape.

They are known for as long as the closure holds on to them, and no longer: weak references keep no graph and
no activations. A tensor that was written to by something that could not be recorded is known no more.

`as_subclass`, and the constructor of a class of tensors, make an alias of a tensor that no
`TorchFunctionMode` is shown. It is found by its node of the graph, `AliasBackward0`, which leads to that of
the tensor it was made from, whether that one still exists or not.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from kronfac.model.nested import Ref, map_leaves

_TAPES = count()
_NODE_KEY = "kronfac.tape"
"""Where the nodes of the graph have the indices of what they computed."""


class Tape:
    """Which tensors are known, and what else the closure may compute from."""

    def __init__(self, model: nn.Module, indices: Iterator[int] | None = None) -> None:
        self._indices = count() if indices is None else indices
        self._trained = {id(p) for p in model.parameters() if p.requires_grad}
        self.outside: dict[int, Tensor] = {}
        """Leaves that require a gradient and are not the model's, by id."""
        self._known: Any = WeakTensorKeyDictionary()
        self._number = next(_TAPES)
        self.shapes: dict[int, torch.Size] = {}
        """Shapes of all tensors, by their indices."""

    def remember(self, tensor: Tensor, known: bool = True) -> int:
        """A new index; for the tensor itself too, if that may be asked for."""
        index = next(self._indices)
        self.shapes[index] = tensor.shape
        if known:
            self.recognize(tensor, index)
        return index

    def recognize(self, tensor: Tensor, index: int) -> None:
        """Know a tensor by an index that was given out elsewhere."""
        self._known[tensor] = entry = (index, tensor._version)
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata.setdefault(_NODE_KEY, {})[self._number, tensor.output_nr] = entry

    def alias(self, tensor: Tensor, other: Tensor) -> None:
        """Take a tensor for another one that is known."""
        self.recognize(tensor, self._known[other][0])

    def index(self, leaf: Any) -> int | None:
        """The index of a tensor; None if it is not known, or was written to since."""
        if not isinstance(leaf, Tensor):
            return None
        entry = self._known.get(leaf) or self._entry_of_alias(leaf)
        return None if entry is None or entry[1] != leaf._version else entry[0]

    def _entry_of_alias(self, tensor: Tensor) -> tuple[int, int] | None:
        """The entry of a known tensor that this one is an alias of, which is then known too."""
        with torch._C.DisableTorchFunction():  # the class may have a `grad_fn` of its own
            node: Any = tensor.grad_fn
        while node is not None and node.name() == "AliasBackward0":
            node, number = node.next_functions[0]
            entries = {} if node is None else node.metadata.get(_NODE_KEY, {})
            entry: tuple[int, int] | None = entries.get((self._number, number))
            if entry is not None:
                self._known[tensor] = entry
                return entry
        return None

    def written(self, but: Sequence[int]) -> list[tuple[int, int]] | None:
        """Tensors that were written to, with new indices; None if one of `but` is among them."""
        changed = [
            (tensor, index)
            for tensor, (index, version) in self._known.items()
            if tensor._version != version
        ]
        if any(index in but for _, index in changed):
            return None
        return [(index, self.remember(tensor)) for tensor, index in changed]

    def references(self, given: Any) -> tuple[Any, bool, bool]:
        """The arguments with references to what is known, whether there is any, or a trained parameter."""
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
        stack: list[Any] = [t.grad_fn for t in unknown if t.grad_fn is not None]
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


_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__"}


def written_by(func: Callable[..., Any], args: tuple[Any, ...]) -> Tensor | None:
    """The tensor that a function writes to, by its name."""
    name = getattr(func, "__name__", "")
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return args[0] if in_place and args and isinstance(args[0], Tensor) else None
