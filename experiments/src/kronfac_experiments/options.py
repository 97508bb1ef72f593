"""Options that all benchmarks share, and the command line of a configuration."""

import shlex
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from kronfac_experiments.config import hint


@dataclass(frozen=True)
class BenchOptions:
    """Options of every benchmark."""

    threads: int = 2
    """CPU threads."""
    seed: int = 0
    """Seed of initial parameters, data and mini-batches."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """Write the tables as Markdown."""

    def __post_init__(self) -> None:
        at_least(1, threads=self.threads)
        at_least(0, seed=self.seed)


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


def command_line(
    name: str,
    config: Any,
    leave_out: tuple[str, ...] = (),
    positional: tuple[str, ...] = (),
) -> str:
    """The command for the same tables; options at their defaults are left out.

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
