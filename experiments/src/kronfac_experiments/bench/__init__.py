"""Benchmarks: their common options, and how their tables are shown and written."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from rich.console import Console

from kronfac_experiments.machine import machine
from kronfac_experiments.options import at_least, command_line, hint
from kronfac_experiments.pages.document import Document, Table


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


def publish(
    name: str, title: str, config: BenchOptions, settings: Sequence[str], tables: Sequence[Table]
) -> list[Path]:
    """Show the tables and, if wanted, write them as Markdown; return the files that were written."""
    settings = [
        *settings,
        "float32",
        f"{config.threads} thread{'s' if config.threads > 1 else ''}",
        f"seed {config.seed}",
        f"torch {torch.__version__}",
        machine()["processor"] or "unknown processor",
    ]
    command = command_line(f"bench {name}", config, ("output", "runs", "rows"))
    document = Document(title, command, f"{', '.join(settings)}.", tables)
    document.show(Console(highlight=False, soft_wrap=True))
    return [] if config.output is None else document.write_markdown(config.output)


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Median (smallest – largest), each as `show` writes it."""
    return f"{show(median(values))} ({show(min(values))} – {show(max(values))})"
