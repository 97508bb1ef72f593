"""How figures are written: PNG, PDF and CSV of one name, with a table of the numbers in the terminal."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from kronfac_experiments.figures.config import FigureConfig
from kronfac_experiments.pages.drawn import DPI


@dataclass(frozen=True)
class Number:
    """A number that a figure shows, with the paper's if it states one."""

    quantity: str
    value: float | None
    """None: a run did not get there."""
    paper: float | None = None


def publish(
    config: FigureConfig,
    figure: Figure,
    title: str,
    rows: Sequence[Any],
    numbers: Sequence[Number],
    curves: Sequence[Any] = (),
) -> list[Path]:
    """Write the figure and its numbers, say what it shows and where it is, and return the paths.

    Args:
        config: Number of the figure, and the folder.
        figure: As drawn.
        title: For the terminal.
        rows: What the figure shows, of one dataclass.
        numbers: For the terminal.
        curves: More rows, which get a file of their own.
    """
    config.output.mkdir(parents=True, exist_ok=True)
    stem = config.output / f"figure_{config.number}"
    paths = [stem.with_suffix(f".{end}") for end in ("png", "pdf", "csv")]
    figure.savefig(paths[0], dpi=DPI)
    # No date, so that the same figure is the same file.
    figure.savefig(paths[1], dpi=DPI, metadata={"CreationDate": None})
    _write_csv(rows, paths[2])
    if curves:
        paths.append(stem.with_name(f"{stem.name}_curves.csv"))
        _write_csv(curves, paths[3])
    console = Console()
    console.print(title)
    console.print(_table(numbers))
    for path in paths:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
    return paths


def _table(numbers: Sequence[Number]) -> Table:
    with_paper = any(number.paper is not None for number in numbers)
    table = Table("", "here", *(["the paper"] if with_paper else []))
    for number in numbers:
        value = "not reached" if number.value is None else f"{number.value:.5g}"
        paper = "" if number.paper is None else f"{number.paper:g}"
        table.add_row(number.quantity, value, *([paper] if with_paper else []))
    return table


def _write_csv(rows: Sequence[Any], path: Path) -> None:
    """Write rows of one dataclass; what is None is left empty."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(rows[0])])
        writer.writerows(["" if v is None else v for v in astuple(row)] for row in rows)
