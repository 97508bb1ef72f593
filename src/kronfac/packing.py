"""Dataclasses of numbers, tensors and further such dataclasses from their plain form, see `pack`."""

import types
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from kronfac.errors import StateError

T = TypeVar("T")


class Unpacker:
    """Unpacks the parts of one saved state onto a device; a tensor in two places stays one tensor."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._placed: dict[int, Tensor] = {}

    def update(self, value: T, packed: Any, name: str) -> T:
        """The dataclass `value` with the fields that `packed` has; what it has besides is ignored.

        So a rule continues from what another rule of its kind remembered, as far as they have it in common.

        Raises:
            StateError: a field is not of its type; `name` is that of the whole.
        """
        return replace(value, **self._fields(type(value), packed, name))  # type: ignore[type-var]

    def unpack(self, kind: type[T], packed: Any, name: str) -> T:
        """A new dataclass of this kind.

        Raises:
            StateError: a field is not of its type, or missing.
        """
        try:
            return kind(**self._fields(kind, packed, name))
        except TypeError as error:
            raise StateError(f"The state's {name} is incomplete: {error}.") from error

    def place(self, value: Any) -> Any:
        """Nested plain data with all tensors copied to the device, and lists as tuples."""
        if isinstance(value, Tensor):
            if id(value) not in self._placed:
                self._placed[id(value)] = value.detach().clone().to(self._device)
            return self._placed[id(value)]
        if isinstance(value, dict):
            return {key: self.place(item) for key, item in value.items()}
        return tuple(map(self.place, value)) if isinstance(value, (list, tuple)) else value

    def _fields(self, kind: type, packed: Any, name: str) -> dict[str, Any]:
        if not isinstance(packed, dict):
            raise StateError(f"The state's {name} is no dictionary; got {packed!r}.")
        hints = get_type_hints(kind)
        return {
            f.name: self._value(hints[f.name], packed[f.name], f"{name}.{f.name}")
            for f in fields(kind)
            if f.name in packed
        }

    def _value(self, hint: Any, packed: Any, name: str) -> Any:
        if get_origin(hint) in (Union, types.UnionType):
            if packed is None and types.NoneType in get_args(hint):
                return None
            # Of the alternatives the first that is not None; rules have no use for more.
            hint = next(kind for kind in get_args(hint) if kind is not types.NoneType)
        if is_dataclass(hint) and isinstance(hint, type):
            return self.unpack(hint, packed, name)
        if get_origin(hint) is tuple and isinstance(packed, (list, tuple)):
            kinds = get_args(hint)
            kinds = kinds[:1] * len(packed) if kinds[-1] is Ellipsis else kinds
            if len(kinds) == len(packed):
                return tuple(
                    self._value(kind, item, name) for kind, item in zip(kinds, packed, strict=True)
                )
        if hint is Tensor and isinstance(packed, Tensor):
            return self.place(packed)
        if hint is float and isinstance(packed, (int, float)) and not isinstance(packed, bool):
            return float(packed)
        if hint in (int, bool, str) and type(packed) is hint:
            return packed
        raise StateError(
            f"The state's {name} is of another type: {hint} is expected; got {packed!r}."
        )
