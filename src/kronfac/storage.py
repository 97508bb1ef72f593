"""Values made of tensors, numbers and tuples, to plain dictionaries and back.

`torch.load(weights_only=True)` reads plain containers only. A dataclass that is saved is a `Storable`: its
plain form has its fields and the qualified name of its class, which may be from outside the package.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kronfac.errors import StateError

CLASS = "class"
"""The entry that names the class."""
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
    """A dataclass of tensors, numbers, strings, None, tuples, dicts and further such dataclasses."""

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


def check_vector(vector: Sequence[Tensor], units: Sequence[Layout], name: str) -> None:
    """Raise a StateError if a vector in parameter space has not one matrix (rows, columns) per unit."""
    if len(vector) != len(units):
        raise StateError(
            f"The state's {name} must have one matrix for each of {len(units)} units; got {len(vector)}."
        )
    for V, unit in zip(vector, units, strict=True):
        _check_tensor(V, [(unit.rows, unit.columns)], unit, name, {})


def saved_fields(kind: type) -> list[Field[Any]]:
    """The fields of a dataclass that are written."""
    return [f for f in fields(kind) if f.metadata.get("saved", True)]


def pack(value: Any) -> Any:
    """Plain dicts, lists, tensors and numbers."""
    if isinstance(value, Storable):
        values = {f.name: pack(getattr(value, f.name)) for f in saved_fields(type(value))}
        return {CLASS: qualified_name(type(value)), **values}
    if isinstance(value, dict):
        return {key: pack(item) for key, item in value.items()}
    return [pack(item) for item in value] if isinstance(value, (list, tuple)) else value


def unpack(
    packed: Any,
    device: torch.device = CPU,
    *,
    dtype: torch.dtype | None = None,
    classes: Iterable[type] = (),
) -> Any:
    """The value that `pack` made plain, with tuples for lists; a tensor in two places stays one tensor.

    Args:
        packed: of a `Storable`, or of containers of them.
        device: of all tensors.
        dtype: of all floating-point tensors; None for that of each.
        classes: preferred to others of the same name, as when a notebook defines a class again.

    Raises:
        StateError: a class is not known, an entry is missing or unknown, or a tensor is not finite.
    """
    known = Storable._classes | {qualified_name(kind): kind for kind in classes}
    placed: dict[int, Tensor] = {}

    def read(item: Any, name: str) -> Any:
        if isinstance(item, Tensor):
            if id(item) not in placed:
                if not bool(item.isfinite().all()):
                    raise StateError(
                        f"The saved {name} must be finite; it holds NaN or infinity. Load an earlier state."
                    )
                wanted = dtype if item.is_floating_point() else None
                placed[id(item)] = item.detach().clone().to(device, wanted)
            return placed[id(item)]
        if isinstance(item, (list, tuple)):
            return tuple(read(part, f"{name}[{n}]") for n, part in enumerate(item))
        if not isinstance(item, dict):
            return item
        kind = _class_of(item, known, name) if CLASS in item else None
        values = {key: read(part, f"{name}.{key}") for key, part in item.items() if key != CLASS}
        return values if kind is None else kind(**values)

    return read(packed, "state")


def _class_of(packed: Mapping[str, Any], known: Mapping[str, type], name: str) -> type:
    """The class that `packed` names, if its entries are the fields of that class."""
    kind = known.get(packed[CLASS])
    if kind is None:
        raise StateError(
            f"The saved {name} is of class {packed[CLASS]!r}, which is not known here. If it is one of "
            "your own, import what defines it first."
        )
    names = [f.name for f in saved_fields(kind)]
    if missing := [field for field in names if field not in packed]:
        raise StateError(f"The saved {name} is incomplete: it has no {missing}.")
    if unknown := [key for key in packed if key not in (CLASS, *names)]:
        raise StateError(f"The saved {name} has entries that are not known here: {unknown}.")
    return kind


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of such a value."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Storable):
        value = [getattr(value, f.name) for f in saved_fields(type(value))]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]
