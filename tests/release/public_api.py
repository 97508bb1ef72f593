"""The public names of the library with their signatures, as lines of text.

    python -m tests.release.public_api      record them anew

Annotations are left out: they are for type checkers, and versions of Python print them differently. So is
what classes inherit from torch.
"""

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType

RECORDED = Path(__file__).parent / "public_api.txt"
MODULES = (
    "kronfac",
    "kronfac.errors",
    "kronfac.extend",
    "kronfac.physics",
    "kronfac.presets",
    "kronfac.testing",
)
"""Whose names users may rely on; the other modules may change in any release."""

HEAD = """\
# Public names and their signatures, for tests/release/test_public_api.py.
# Recorded by: python -m tests.release.public_api
"""


def public_names(module: ModuleType) -> list[str]:
    """The names in `__all__`, or else what the module defines itself."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    return sorted(
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    )


def own(function: object) -> bool:
    """Whether a function is kronfac's, and not torch's or typing's."""
    return (getattr(function, "__module__", None) or "").split(".")[0] == "kronfac"


def signature(function: object) -> str:
    """Names, kinds and plain defaults of its arguments."""
    parameters = []
    for p in inspect.signature(function).parameters.values():  # type: ignore[arg-type]
        default = p.default
        if default is not p.empty:
            # Of the built-in types alone: a subclass prints as it likes.
            plain = default is None or type(default) in (bool, int, float, str)
            default = _Text(repr(default) if plain else "...")
        parameters.append(p.replace(annotation=p.empty, default=default))
    return str(inspect.Signature(parameters))


class _Text(str):
    """A default that is printed as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def members(path: str, kind: type) -> Iterator[tuple[str, str]]:
    """What a class, or one of kronfac's that it extends, defines publicly."""
    listed: list[str] = []  # before the others, in an order of their own
    if issubclass(kind, Enum):
        listed = [member.name for member in kind]
        for member in kind:
            yield f"{path}.{member.name}", f"= {member.value!r}"
    elif issubclass(kind, tuple):
        listed = list(getattr(kind, "_fields", ()))
        for field in listed:
            yield f"{path}.{field}", "field"
    owners = [owner for owner in kind.__mro__ if own(owner)]
    names = {name for o in owners for name in (*vars(o), *inspect.get_annotations(o))}
    for name in sorted(names - set(listed)):
        value = inspect.getattr_static(
            kind, name, None
        )  # a field without a default is an annotation only
        if name.startswith("_"):
            continue
        if isinstance(value, (classmethod, staticmethod)):
            yield f"{path}.{name}", signature(getattr(kind, name))
        elif inspect.isfunction(value):
            if own(value):
                yield f"{path}.{name}", signature(value)
        elif isinstance(value, property) or hasattr(value, "__get__"):
            yield f"{path}.{name}", "property"
        else:
            yield f"{path}.{name}", "attribute"


def describe(path: str, value: object) -> Iterator[tuple[str, str]]:
    """The lines of one public name."""
    if inspect.isclass(value):
        constructed = own(value.__init__) or (own(value.__new__) and not issubclass(value, tuple))
        yield path, signature(value) if constructed and not issubclass(value, Enum) else "class"
        yield from members(path, value)
    elif inspect.isfunction(value):
        yield path, signature(value)
    elif inspect.ismodule(value):
        yield path, "module"
    else:
        yield path, "value"


def current() -> str:
    """The record as it would be made now."""
    lines = []
    for name in MODULES:
        module = importlib.import_module(name)
        for public in public_names(module):
            lines += describe(f"{name}.{public}", getattr(module, public))
    return HEAD + "".join(f"{path} {what}\n" for path, what in lines)


if __name__ == "__main__":
    RECORDED.write_text(current())
