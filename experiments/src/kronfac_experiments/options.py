"""What the benchmarks are all told, sizes with a usual value, and the command that says it all again."""

import shlex
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from kronfac_experiments.config import hint

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@dataclass(frozen=True)
class BenchOptions:
    """Shared by the commands; each has a name and a folder."""

    threads: int = 2
    """CPU threads."""
    seed: int = 0
    """Seed of initial parameters, data and mini-batches."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/bench-…")] = None
    """Folder for the measurements (JSON) and the page."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """Write the tables there, too, as Markdown."""

    def __post_init__(self) -> None:
        at_least(1, threads=self.threads)
        at_least(0, seed=self.seed)

    def settings(self, *without: str) -> dict[str, Any]:
        """What a measurement depends on: all but where it is written, and these."""
        left_out = {"run_dir", "output", *without}
        return {name: value for name, value in asdict(self).items() if name not in left_out}

    def folder(self, name: str) -> Path:
        """Where everything is written."""
        return self.run_dir or Path("runs") / f"bench-{name}"


def at_least(least: float, **options: Any) -> None:
    """Check options that are numbers or several of them.

    Raises:
        ValueError: one is smaller, or one of several is missing.
    """
    for name, value in options.items():
        values = value if isinstance(value, tuple) else (value,)
        if not values or min(values) < least:
            words = " ".join(map(str, values)) or "none"
            raise ValueError(f"--{name.replace('_', '-')} is {least:g} or more; got {words}.")


S = TypeVar("S", bound="DataclassInstance")


def override(usual: S, given: object) -> S:
    """The usual sizes, but for those that an attribute of `given` has of the same name and not None."""
    own = {field.name: getattr(given, field.name) for field in fields(usual)}
    return replace(usual, **{name: value for name, value in own.items() if value is not None})


def command_line(
    name: str,
    config: Any,
    leave_out: tuple[str, ...] = ("run_dir",),
    positional: tuple[str, ...] = (),
) -> str:
    """What to type for the same tables; options at their defaults are left out.

    Nor does the folder of the measurements matter to anyone else.

    Args:
        name: Words of the command after `kronfac`.
        config: Its options.
        leave_out: Options that are not said.
        positional: Options that have no name.
    """
    words = ["kronfac", *name.split()]
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default is not MISSING else None
        if field.name in leave_out or value == default:
            continue
        if field.name not in positional:
            words.append(f"--{field.name.replace('_', '-')}")
        if not isinstance(value, bool):
            values = value if isinstance(value, tuple) else (value,)
            words += [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return shlex.join(words)
