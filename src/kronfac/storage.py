"""Values made of tensors, numbers and tuples, to plain dictionaries and back, checked on the way.

`torch.load(weights_only=True)` reads plain containers only. The type hints of a dataclass say how its plain
form is read: nothing may be missing, unknown or of another type, and tensors are finite. A hint
`Annotated[…, PER_UNIT]` marks a vector in parameter space: one matrix V (rows, columns) per unit.

A `Storable` is written with the qualified name of its class, so that it comes back as the same class, also
for classes from outside the package. Its `shapes` are the shapes that its tensors must have.
"""

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from torch import Tensor

from kronfac.errors import StateError

T = TypeVar("T")

CLASS = "class"
"""The entry that names the class."""
PER_UNIT = "per unit"
"""Marks the hint of a vector in parameter space."""


class Layout(NamedTuple):
    """What is saved of a unit has to fit this: its matrix V (rows, columns)."""

    name: str
    rows: int
    columns: int
    dtype: torch.dtype


Shape = tuple[int | str, ...]
"""Sizes; one that only has to be the same in several places goes by a name."""
Shapes = Mapping[str, Shape | list[Shape]]
"""By field, the shape of its tensors or a list of those allowed."""


def qualified_name(kind: type) -> str:
    """The name that a class is saved by.

    Classes of this package go by "kronfac" and their own name, so that a state survives a module's move;
    all others by their module and name, so that equal names in two modules are two classes.
    """
    package = __name__.partition(".")[0]
    own = kind.__module__.partition(".")[0] == package
    return f"{package if own else kind.__module__}.{kind.__qualname__}"


class Storable:
    """A frozen dataclass of tensors, numbers, strings, tuples and further such dataclasses."""

    _classes: ClassVar[dict[str, type["Storable"]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Storable._classes[qualified_name(cls)] = cls

    def shapes(self, rows: int, columns: int) -> Shapes:
        """The shapes of its tensors for a unit (rows, columns); what is left out is not checked."""
        return {}

    def check(self, *units: Layout) -> None:
        """Raise a StateError if it can't be of these units: a tensor has another shape or dtype."""
        (unit,) = units
        check_shapes(self, self.shapes(unit.rows, unit.columns), unit)


def check_shapes(value: Any, shapes: Shapes, unit: Layout) -> None:
    """Raise a StateError if a tensor in these fields has another shape, or not the unit's dtype."""
    sizes: dict[str, int] = {}
    for field, allowed in shapes.items():
        alternatives = allowed if isinstance(allowed, list) else [allowed]
        for tensor in tensors_in(getattr(value, field)):
            _check_tensor(tensor, alternatives, unit, f"{type(value).__name__}.{field}", sizes)


def _check_tensor(
    tensor: Tensor, shapes: Sequence[Shape], unit: Layout, name: str, sizes: dict[str, int]
) -> None:
    """Refuse another shape or dtype; `sizes` are those that have been seen of the named ones."""
    if not any(_fits(tensor.shape, shape, sizes) for shape in shapes):
        expected = " or ".join(str(tuple(sizes.get(str(n), n) for n in shape)) for shape in shapes)
        raise StateError(
            f"The state's {name} of {unit.name!r} has the shape {tuple(tensor.shape)}; it must be "
            f"{expected}. Load it into the model that it was saved with."
        )
    if tensor.dtype != unit.dtype:
        raise StateError(
            f"The state's {name} of {unit.name!r} is {tensor.dtype}; the parameters are {unit.dtype}. "
            "Load it into a model of the dtype that it was saved with."
        )


def _fits(sizes: Sequence[int], shape: Shape, known: dict[str, int]) -> bool:
    return len(sizes) == len(shape) and all(
        size == (known.setdefault(expected, size) if isinstance(expected, str) else expected)
        for size, expected in zip(sizes, shape, strict=True)
    )


def pack(value: Any) -> Any:
    """Plain dicts, lists, tensors and numbers."""
    if is_dataclass(value) and not isinstance(value, type):
        packed = {f.name: pack(getattr(value, f.name)) for f in fields(value)}
        return (
            {CLASS: qualified_name(type(value)), **packed}
            if isinstance(value, Storable)
            else packed
        )
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    return [pack(item) for item in value] if isinstance(value, (list, tuple)) else value


def unpack(packed: Any) -> Any:
    """The `Storable` that `pack` made plain, on the CPU.

    Raises:
        StateError: see `Unpacker`.
    """
    return Unpacker(torch.device("cpu")).unpack(Storable, packed)


class Unpacker:
    """Reads what `pack` made plain, onto a device; a tensor in two places stays one tensor.

    Args:
        device: of all tensors.
        units: what vectors in parameter space have to fit; None if that is not known.
        classes: preferred to others of the same name, as when a notebook defines a class again.
    """

    def __init__(
        self,
        device: torch.device,
        units: Sequence[Layout] | None = None,
        classes: Iterable[type] = (),
    ) -> None:
        self._device, self._units = device, units
        self._classes = Storable._classes | {qualified_name(kind): kind for kind in classes}
        self._placed: dict[int, Tensor] = {}

    def unpack(self, kind: type[T], packed: Any, name: str = "") -> T:
        """The value of this type, which may be any type hint; `name` is for errors.

        Raises:
            StateError: something is missing, unknown or of another type, or a tensor is not finite.
        """
        value: T = self._value(kind, packed, name)
        return value

    def _value(self, hint: Any, packed: Any, name: str, marks: Sequence[Any] = ()) -> Any:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._value(arguments[0], packed, name, arguments[1:])
        if origin in (Union, types.UnionType):
            return self._alternative(arguments, packed, name)
        if origin is tuple and isinstance(packed, (list, tuple)):
            return self._tuple(arguments, packed, name, PER_UNIT in marks)
        if isinstance(packed, dict):
            return self._mapping(hint, packed, name)
        if hint is Tensor and isinstance(packed, Tensor):
            return self._tensor(packed, name)
        return _scalar(hint, packed, name)

    def _mapping(self, hint: Any, packed: dict[str, Any], name: str) -> Any:
        if get_origin(hint) is dict:
            kind = get_args(hint)[1]
            return {key: self._value(kind, item, f"{name}.{key}") for key, item in packed.items()}
        if not isinstance(hint, type):
            raise StateError(_mismatch([hint], packed, name))
        plain = is_dataclass(hint) and not issubclass(hint, Storable)
        return self._fields(hint, packed, name) if plain else self._named([hint], packed, name)

    def _alternative(self, hints: Sequence[Any], packed: Any, name: str) -> Any:
        if packed is None and types.NoneType in hints:
            return None
        some = [hint for hint in hints if hint is not types.NoneType]
        if len(some) == 1:
            return self._value(some[0], packed, name)
        if type(packed) in some:
            return self._value(type(packed), packed, name)
        if not isinstance(packed, dict):
            raise StateError(_mismatch(some, packed, name))
        return self._named([hint for hint in some if isinstance(hint, type)], packed, name)

    def _tuple(
        self, hints: Sequence[Any], packed: Sequence[Any], name: str, per_unit: bool
    ) -> tuple[Any, ...]:
        if hints[-1] is Ellipsis:
            hints = [hints[0]] * len(packed)
        if len(hints) != len(packed):
            raise StateError(f"{_whose(name)} must have {len(hints)} items; got {len(packed)}.")
        items = tuple(
            self._value(hint, item, f"{name}[{i}]")
            for i, (hint, item) in enumerate(zip(hints, packed, strict=True))
        )
        if per_unit and self._units is not None:
            _check_vector(items, self._units, name)
        return items

    def _tensor(self, packed: Tensor, name: str) -> Tensor:
        if id(packed) not in self._placed:
            if not bool(packed.isfinite().all()):
                raise StateError(
                    f"{_whose(name)} must be finite; it holds NaN or infinity. Load an earlier state."
                )
            self._placed[id(packed)] = packed.detach().clone().to(self._device)
        return self._placed[id(packed)]

    def _named(self, kinds: Sequence[type], packed: dict[str, Any], name: str) -> Any:
        """The `Storable` that `packed` names, if it is of one of these kinds."""
        given = packed.get(CLASS)
        kind = self._classes.get(given) if isinstance(given, str) else None
        if kind is None:
            raise StateError(
                f"{_whose(name)} is of class {given!r}, which is not known here. If it is one of your "
                "own, import what defines it first."
            )
        rest = {key: item for key, item in packed.items() if key != CLASS}
        value = self._fields(kind, rest, name)
        if not isinstance(value, tuple(kinds)):
            raise StateError(_mismatch(kinds, value, name))
        return value

    def _fields(self, kind: type, packed: dict[str, Any], name: str) -> Any:
        hints = get_type_hints(kind, include_extras=True)
        names = [f.name for f in fields(kind)]
        if missing := [field for field in names if field not in packed]:
            raise StateError(f"{_whose(name)} is incomplete: it has no {missing}.")
        if unknown := [key for key in packed if key not in names]:
            raise StateError(f"{_whose(name)} has entries that are not known here: {unknown}.")
        prefix = f"{name}." if name else ""
        values = {
            field: self._value(hints[field], packed[field], prefix + field) for field in names
        }
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:
            raise StateError(f"{_whose(name)} can't be a {kind.__name__}: {error}") from error


def _check_vector(vector: Sequence[Tensor], units: Sequence[Layout], name: str) -> None:
    """Refuse what is no vector in the space of these units' parameters."""
    if len(vector) != len(units):
        raise StateError(
            f"{_whose(name)} must have one matrix for each of {len(units)} units; got {len(vector)}."
        )
    for V, unit in zip(vector, units, strict=True):
        _check_tensor(V, [(unit.rows, unit.columns)], unit, name, {})


def _scalar(hint: Any, packed: Any, name: str) -> Any:
    """A number, a bool or a string."""
    if hint is float and type(packed) is int:
        packed = float(packed)
    known = hint in (int, float, bool, str) and isinstance(packed, hint)
    if not known or isinstance(packed, bool) != (hint is bool):
        raise StateError(_mismatch([hint], packed, name))
    return packed


def _mismatch(hints: Sequence[Any], packed: Any, name: str) -> str:
    expected = " or ".join(getattr(hint, "__name__", str(hint)) for hint in hints)
    got = packed if isinstance(packed, (str, int, float, types.NoneType)) else type(packed)
    return f"{_whose(name)} must be of type {expected}; got {got!r}. Load an earlier state."


def _whose(name: str) -> str:
    return f"The state's {name}" if name else "The state"


def map_tensors(packed: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What `pack` made, with other tensors; a tensor in two places stays one tensor."""
    made: dict[int, Tensor] = {}

    def apply(item: Any) -> Any:
        if isinstance(item, Tensor):
            return made.setdefault(id(item), change(item))
        if isinstance(item, dict):
            return {key: apply(value) for key, value in item.items()}
        return [apply(value) for value in item] if isinstance(item, (list, tuple)) else item

    return apply(packed)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of such a value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return [t for field in fields(value) for t in tensors_in(getattr(value, field.name))]
    return []
