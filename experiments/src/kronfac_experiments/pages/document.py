"""Tables and pictures as values, shown in the terminal, written as Markdown or as one HTML file."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from rich.console import Console
from rich.table import Table as RichTable

from kronfac import KronfacError
from kronfac_experiments.files import write_atomically

WRITTEN = "## What it shows"
"""Heading of the section that people write."""


class PageError(KronfacError, ValueError):
    """A page can't be written."""


@dataclass(frozen=True)
class Table:
    """Cells as text; the first column names the row.

    Args:
        heading: What is in it.
        columns: Their headings.
        rows: Lists of as many cells.
        note: What the numbers mean.
        detail: Too much for the terminal, which leaves it out.
    """

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    detail: bool = False


@dataclass(frozen=True)
class Picture:
    """Drawn elsewhere; a PNG file, and what it shows in words."""

    heading: str
    description: str
    png: bytes


@dataclass(frozen=True)
class Document:
    """All that a benchmark or a report has to say.

    Args:
        title: One line.
        command: What made it.
        settings: What the numbers depend on, in one paragraph.
        tables: In their order.
        pictures: Files beside the Markdown.
    """

    title: str
    command: str
    settings: str
    tables: Sequence[Table]
    pictures: Sequence[Picture] = ()

    def show(self, console: Console) -> None:
        """In the terminal."""
        for table in (table for table in self.tables if not table.detail):
            console.print(f"\n{table.heading}", style="bold")
            console.print(self.settings)
            shown = RichTable()
            for index, column in enumerate(table.columns):
                right = index > 0
                shown.add_column(
                    column, justify="right" if right else "left", overflow="fold", no_wrap=not right
                )
            for row in table.rows:
                shown.add_row(*(cell.replace("**", "") for cell in row))
            console.print(shown)
            if table.note:
                console.print(table.note)

    def markdown(self, files: Sequence[str] = ()) -> str:
        """For a file of the documentation; `files` are the names of the pictures beside it."""
        blocks = [f"# {self.title}", f"Made by `{self.command}`.", self.settings]
        for table in self.tables:
            rule = ["---", *["---:"] * (len(table.columns) - 1)]
            rows = [table.columns, rule, *table.rows]
            blocks.append(f"## {table.heading}")
            blocks.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
            blocks += [table.note] if table.note else []
        for picture, file in zip(self.pictures, files, strict=True):
            blocks += [f"## {picture.heading}", f"![{picture.description}]({file})"]
        return "\n\n".join(blocks) + "\n"

    def write_markdown(self, path: Path) -> list[Path]:
        """Write it, and its pictures beside it; return where.

        A section under `WRITTEN` that the file has is somebody's own words, and stays, before the others.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        files = [
            path.with_name(f"{path.stem}{f'_{k}' if k else ''}.png")
            for k in range(len(self.pictures))
        ]
        written = _written(path.read_text(encoding="utf-8")) if path.exists() else ""
        head, mark, rest = self.markdown([file.name for file in files]).partition("\n## ")
        path.write_text(f"{head}{written}{mark}{rest}", encoding="utf-8")
        for picture, file in zip(self.pictures, files, strict=True):
            file.write_bytes(picture.png)
        return [path, *files]

    @property
    def html(self) -> str:
        """One page with everything in it: no script, no network."""
        parts = [(table.heading, _html_table(table)) for table in self.tables]
        parts += [(picture.heading, _html_picture(picture)) for picture in self.pictures]
        sections = [
            f'<section id="part-{k}">\n<h2>{escape(heading)}</h2>\n{content}\n</section>'
            for k, (heading, content) in enumerate(parts)
        ]
        links = [
            f'<a href="#part-{k}">{escape(heading)}</a>' for k, (heading, _) in enumerate(parts)
        ]
        return Template(_packaged("page.html")).substitute(
            title=escape(self.title),
            css=_packaged("page.css"),
            settings=escape(self.settings),
            links="\n".join(links),
            sections="\n".join(sections),
            command=escape(self.command),
        )

    def write_html(self, path: Path) -> Path:
        """Write the page and return where it is; an earlier one is replaced at once or not at all.

        Raises:
            PageError: it can't be written there.
        """
        # A folder's name may hold bytes that are no text.
        content = self.html.encode("utf-8", errors="replace")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, lambda stream: stream.write(content))
        except OSError as error:
            raise PageError(
                f"The report cannot be written to '{path}': {error.strerror}. "
                "Name another file with --output."
            ) from error
        return path


def _packaged(name: str) -> str:
    """The content of a file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _html_table(table: Table) -> str:
    """A table that scrolls sideways by itself, also with the keyboard."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{_html_cell(cell)}</td>" for cell in cells)
        + "</tr>"
        for first, *cells in table.rows
    )
    note = f'\n<p class="note">{escape(table.note)}</p>' if table.note else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.heading)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>\n{rows}\n</tbody></table></div>{note}"
    )


def _html_cell(cell: str) -> str:
    """A cell, whose bold words are between double asterisks, as in Markdown."""
    return re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(cell))


def _html_picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    return (
        f'<img alt="{escape(picture.heading)}" src="data:image/png;base64,{data}">'
        f'\n<p class="note">{escape(picture.description)}</p>'
    )


def _written(text: str) -> str:
    """The section under `WRITTEN`, from the end of the line before it; nothing if there is none."""
    _, mark, rest = text.partition(f"\n{WRITTEN}\n")
    section = rest.split("\n## ")[0].rstrip("\n")
    return f"\n{WRITTEN}\n{section}\n" if mark else ""
