"""How figures are written: PNG, PDF and CSV of one name, with a table of the numbers in the terminal."""

import csv
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

# Okabe and Ito's colours, told apart by all kinds of colour vision.
BLUE, VERMILION, GREEN, BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"

DPI = 160


@dataclass(frozen=True)
class Number:
    """A number that a figure shows, with the paper's where it states one."""

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
    return [png, pdf, write_table(rows, table)]


def write_table(rows: Sequence[Any], path: Path) -> Path:
    """Write rows of one dataclass as CSV; what is None is left empty. Returns the path."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([field.name for field in fields(rows[0])])
        writer.writerows(["" if v is None else v for v in astuple(row)] for row in rows)
    return path


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
