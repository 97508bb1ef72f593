"""Values made of tensors, numbers and tuples, to plain dictionaries and back, checked on the way.

`torch.load(weights_only=True)` reads plain containers only. The type hints of a dataclass say how its plain
form is read: nothing may be missing, unknown or of another type, and tensors are finite. A hint
`Annotated[…, PER_UNIT]` marks a vector in parameter space: one matrix V (rows, columns) per unit.

A `Storable` is written with the qualified name of its class, so that it comes back as the same class, also
for classes from outside the package. Its `shapes` are the shapes that its tensors must have.
"""

import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
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
UNSAVED = {"saved": False}
"""Metadata of a field that is not written, and has its default when the rest is read."""
CPU = torch.device("cpu")


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
        named = {CLASS: qualified_name(type(value))} if isinstance(value, Storable) else {}
        return named | {f.name: pack(getattr(value, f.name)) for f in saved_fields(type(value))}
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    return [pack(item) for item in value] if isinstance(value, (list, tuple)) else value


def saved_fields(kind: type) -> list[Field[Any]]:
    """The fields of a dataclass that are written."""
    return [f for f in fields(kind) if f.metadata.get("saved", True)]


def unpack(
    packed: Any,
    kind: Any = Storable,
    device: torch.device = CPU,
    *,
    name: str = "",
    dtype: torch.dtype | None = None,
    units: Sequence[Layout] | None = None,
    classes: Iterable[type] = (),
) -> Any:
    """The value that `pack` made plain; a tensor in two places stays one tensor.

    Args:
        packed: of a `Storable`, or of what `kind` says.
        kind: its type, which may be any type hint.
        device: of all tensors.
        name: for errors.
        dtype: of all floating-point tensors; None for that of each.
        units: what vectors in parameter space have to fit; None if that is not known.
        classes: preferred to others of the same name, as when a notebook defines a class again.

    Raises:
        StateError: something is missing, unknown or of another type, or a tensor is not finite.
    """
    known = Storable._classes | {qualified_name(kind): kind for kind in classes}
    return _Reader(device, dtype, units, known).read(kind, packed, name)


class _Reader:
    """Reads one value by its type hints; see `unpack`."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype | None,
        units: Sequence[Layout] | None,
        classes: Mapping[str, type],
    ) -> None:
        self._device, self._dtype, self._units, self._classes = device, dtype, units, classes
        self._placed: dict[int, Tensor] = {}

    def read(self, hint: Any, packed: Any, name: str) -> Any:
        marks: list[Any] = []
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
        origin, arguments = get_origin(hint), get_args(hint)
        hints = [hint]
        if origin in (Union, types.UnionType):
            if packed is None and types.NoneType in arguments:
                return None
            hints = [one for one in arguments if one is not types.NoneType]
            if len(hints) == 1:
                return self.read(hints[0], packed, name)
        if origin is tuple and isinstance(packed, (list, tuple)):
            return self._tuple(arguments, packed, name, PER_UNIT in marks)
        if isinstance(packed, dict) and origin is dict:
            return {key: self.read(arguments[1], v, f"{name}.{key}") for key, v in packed.items()}
        if isinstance(packed, dict) and all(isinstance(one, type) for one in hints):
            return self._dataclass(hints, packed, name)
        return self._leaf(hints, packed, name)

    def _leaf(self, hints: Sequence[Any], packed: Any, name: str) -> Any:
        """A tensor, a number, a bool or a string."""
        if isinstance(packed, Tensor) and Tensor in hints:
            return self._tensor(packed, name)
        if float in hints and type(packed) is int:
            packed = float(packed)
        plain = [one for one in hints if one in (bool, int, float, str)]
        if not isinstance(packed, tuple(plain)) or isinstance(packed, bool) != (bool in plain):
            raise StateError(_mismatch(hints, packed, name))
        return packed

    def _tuple(
        self, hints: Sequence[Any], packed: Sequence[Any], name: str, per_unit: bool
    ) -> tuple[Any, ...]:
        if hints[-1] is Ellipsis:
            hints = [hints[0]] * len(packed)
        if len(hints) != len(packed):
            raise StateError(f"{_whose(name)} must have {len(hints)} items; got {len(packed)}.")
        pairs = enumerate(zip(hints, packed, strict=True))
        items = tuple(self.read(hint, item, f"{name}[{i}]") for i, (hint, item) in pairs)
        if per_unit and self._units is not None:
            if len(items) != len(self._units):
                raise StateError(
                    f"{_whose(name)} must have one matrix for each of {len(self._units)} units; got "
                    f"{len(items)}."
                )
            for V, unit in zip(items, self._units, strict=True):
                _check_tensor(V, [(unit.rows, unit.columns)], unit, name, {})
        return items

    def _tensor(self, packed: Tensor, name: str) -> Tensor:
        if id(packed) not in self._placed:
            if not bool(packed.isfinite().all()):
                raise StateError(
                    f"{_whose(name)} must be finite; it holds NaN or infinity. Load an earlier state."
                )
            dtype = self._dtype if packed.is_floating_point() else None
            self._placed[id(packed)] = packed.detach().clone().to(self._device, dtype)
        return self._placed[id(packed)]

    def _dataclass(self, kinds: Sequence[type], packed: dict[str, Any], name: str) -> Any:
        """The dataclass that is wanted, or the `Storable` that `packed` names if it is of these kinds."""
        kind: type | None = kinds[0]
        if not is_dataclass(kind) or issubclass(kind, Storable):
            given = packed.get(CLASS)
            kind = self._classes.get(given) if isinstance(given, str) else None
            if kind is None:
                raise StateError(
                    f"{_whose(name)} is of class {given!r}, which is not known here. If it is one of "
                    "your own, import what defines it first."
                )
            packed = {key: item for key, item in packed.items() if key != CLASS}
        hints = get_type_hints(kind, include_extras=True)
        names = [f.name for f in saved_fields(kind)]
        if missing := [field for field in names if field not in packed]:
            raise StateError(f"{_whose(name)} is incomplete: it has no {missing}.")
        if unknown := [key for key in packed if key not in names]:
            raise StateError(f"{_whose(name)} has entries that are not known here: {unknown}.")
        prefix = f"{name}." if name else ""
        values = {field: self.read(hints[field], packed[field], prefix + field) for field in names}
        try:
            value = kind(**values)
        except (TypeError, ValueError) as error:
            raise StateError(f"{_whose(name)} can't be a {kind.__name__}: {error}") from error
        if not isinstance(value, tuple(kinds)):
            raise StateError(_mismatch(kinds, value, name))
        return value


def _mismatch(hints: Sequence[Any], packed: Any, name: str) -> str:
    expected = " or ".join(getattr(hint, "__name__", str(hint)) for hint in hints)
    got = packed if isinstance(packed, (str, int, float, types.NoneType)) else type(packed)
    return f"{_whose(name)} must be of type {expected}; got {got!r}. Load an earlier state."


def _whose(name: str) -> str:
    return f"The state's {name}" if name else "The state"


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of such a value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors_in(item)]
    if isinstance(value, dict):
        return tensors_in(list(value.values()))
    if is_dataclass(value) and not isinstance(value, type):
        return [
            t for field in saved_fields(type(value)) for t in tensors_in(getattr(value, field.name))
        ]
    return []
