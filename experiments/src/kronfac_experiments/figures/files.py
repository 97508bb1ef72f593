"""How figures are written: PNG, PDF and CSV of one name, with a table of the numbers in the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from kronfac_experiments.pages.csv_files import write_csv
from kronfac_experiments.pages.drawn import DPI


@dataclass(frozen=True)
class Number:
    """A number that a figure shows, with the paper's if it states one."""

    quantity: str
    value: float | None
    """None: a run did not get there."""
    paper: float | None = None


def write(figure: Figure, rows: Sequence[Any], stem: str, output: Path) -> list[Path]:
    """Write the figure and its numbers, rows of one dataclass; return the paths."""
    output.mkdir(parents=True, exist_ok=True)
    png, pdf, table = (output / f"{stem}.{suffix}" for suffix in ("png", "pdf", "csv"))
    figure.savefig(png, dpi=DPI)
    # No date, so that the same figure is the same file.
    figure.savefig(pdf, dpi=DPI, metadata={"CreationDate": None})
    return [png, pdf, write_csv(rows, table)]


def show(title: str, numbers: Sequence[Number], paths: Sequence[Path]) -> None:
    """Say what the figure shows and where it is."""
    console = Console()
    console.print(title)
    with_paper = any(number.paper is not None for number in numbers)
    table = Table("", "here", *(["the paper"] if with_paper else []))
    for number in numbers:
        value = "not reached" if number.value is None else f"{number.value:.5g}"
        cells = [number.quantity, value]
        if with_paper:
            cells.append("" if number.paper is None else f"{number.paper:g}")
        table.add_row(*cells)
    console.print(table)
    for path in paths:
        console.print(f"wrote {path}", soft_wrap=True, highlight=False)
