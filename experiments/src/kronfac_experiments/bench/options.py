"""What the benchmarks are all told, and the command that says it again."""

import shlex
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from kronfac_experiments.config import hint


@dataclass(frozen=True)
class BenchOptions:
    """Shared by the commands; each has a name and a folder."""

    threads: int = 2
    """CPU threads."""
    seed: int = 0
    """Of initial parameters, data and mini-batches."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/bench-…")] = None
    """Folder for the measurements (JSON) and the page."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """Write the tables there, too, as Markdown."""

    def __post_init__(self) -> None:
        at_least(1, threads=self.threads)
        at_least(0, seed=self.seed)

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


def command_line(name: str, config: Any) -> str:
    """What to type for the same tables; options at their defaults are left out.

    Nor does the folder of the measurements matter to anyone else.
    """
    words = ["kronfac", "bench", name]
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default if field.default is not MISSING else None
        if field.name == "run_dir" or value == default:
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        if not isinstance(value, bool):
            values = value if isinstance(value, tuple) else (value,)
            words += [f"{v:g}" if isinstance(v, float) else str(v) for v in values]
    return shlex.join(words)
