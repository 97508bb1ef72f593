"""What differs between two records of the public names, and which version that needs.

A record has one line per public name, with what it is: a signature in Python's own syntax, in which `...`
stands for a default that is no plain value, or a word such as `property`. `public_api.py` writes it.
"""

import ast
from dataclasses import dataclass
from enum import IntEnum


class Bump(IntEnum):
    """Which part of the version a change needs to raise [Semantic Versioning 2.0.0]."""

    PATCH = 0
    MINOR = 1
    MAJOR = 2


@dataclass(frozen=True)
class Change:
    """One public name that is not as it was."""

    name: str
    old: str | None
    new: str | None

    @property
    def kind(self) -> str:
        """What happened to it: if it is `extended`, calls that worked mean the same as before."""
        if self.old is None:
            return "added"
        if self.new is None:
            return "removed"
        return "extended" if accepts_old_calls(self.old, self.new) else "changed"

    @property
    def bump(self) -> Bump:
        """What it needs from version 1.0 on."""
        return Bump.MINOR if self.kind in ("added", "extended") else Bump.MAJOR

    def __str__(self) -> str:
        before = f"\n      before: {self.old}" if self.old else ""
        after = f"\n      now:    {self.new}" if self.new else ""
        return f"{self.name}: {self.kind} ({self.bump.name.lower()}){before}{after}"


def parse(record: str) -> dict[str, str]:
    """What every name is."""
    lines = [line for line in record.splitlines() if line and not line.startswith("#")]
    return dict(line.split(" ", 1) for line in lines)


def changes(old: str, new: str) -> list[Change]:
    """What differs between two records."""
    before, after = parse(old), parse(new)
    names = sorted(before.keys() | after.keys())
    pairs = [Change(name, before.get(name), after.get(name)) for name in names]
    return [pair for pair in pairs if pair.old != pair.new]


def accepts_old_calls(old: str, new: str) -> bool:
    """Whether every call that fits the old signature fits the new one, and no default is another."""
    if not (old.startswith("(") and new.startswith("(")):
        return False
    before, after = _arguments(old), _arguments(new)
    places = [*before.posonlyargs, *before.args]
    if [a.arg for a in places] != [a.arg for a in [*after.posonlyargs, *after.args]][: len(places)]:
        return False
    by_name = {a.arg for a in [*after.args, *after.kwonlyargs]}
    if not {a.arg for a in [*before.args, *before.kwonlyargs]} <= by_name and not after.kwarg:
        return False
    if (before.vararg and not after.vararg) or (before.kwarg and not after.kwarg):
        return False
    defaults, earlier = _defaults(after), _defaults(before)
    everything = [*after.posonlyargs, *after.args, *after.kwonlyargs]
    known = {a.arg for a in [*places, *before.kwonlyargs]}
    fresh = [a.arg for a in everything if a.arg not in known]
    return all(name in defaults for name in fresh) and all(
        defaults.get(name) == value for name, value in earlier.items()
    )


def _arguments(signature: str) -> ast.arguments:
    definition = ast.parse(f"def f{signature}: pass").body[0]
    assert isinstance(definition, ast.FunctionDef)
    return definition.args


def _defaults(arguments: ast.arguments) -> dict[str, str]:
    """Defaults by the name of their argument."""
    places = [*arguments.posonlyargs, *arguments.args]
    given = places[len(places) - len(arguments.defaults) :]
    found = {a.arg: ast.unparse(d) for a, d in zip(given, arguments.defaults, strict=True)}
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return found | {a.arg: ast.unparse(d) for a, d in named if d is not None}


def needed(differences: list[Change], version: tuple[int, int, int]) -> Bump:
    """The least bump from the version that these were released after.

    Before 1.0 each counts one place lower: what would need a major version needs a minor one.
    """
    most = max((change.bump for change in differences), default=Bump.PATCH)
    return Bump(max(most - 1, 0)) if version[0] == 0 else most


def bump_between(old: tuple[int, int, int], new: tuple[int, int, int]) -> Bump | None:
    """Which part is raised; None if the new version is not the later one."""
    if new <= old:
        return None
    if new[0] > old[0]:
        return Bump.MAJOR
    return Bump.MINOR if new[1] > old[1] else Bump.PATCH
