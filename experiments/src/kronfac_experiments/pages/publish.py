"""The document in the terminal, as Markdown, and as one HTML page that needs no network and no script."""

import base64
from html import escape
from pathlib import Path

from rich.console import Console

from kronfac_experiments.pages.document import BarPlot, Document, LogLogPlot, Picture, Table
from kronfac_experiments.pages.drawing import bars, log_log
from kronfac_experiments.pages.page import Page, packaged, scrolling_table


def publish(
    document: Document, measurements: Path, output: Path | None, console: Console
) -> list[Path]:
    """Show the tables, write the page beside the measurements and, if wanted, the Markdown.

    Returns where everything is.
    """
    document.show(console)
    page = render(document).write(measurements.with_suffix(".html"))
    written = [measurements, page]
    return written if output is None else [*written, *document.write_markdown(output)]


def render(document: Document) -> Page:
    """The whole page: plots first, then the tables that they are drawn from."""
    sections = []
    if document.plots:
        drawings = "".join(_figure(plot) for plot in document.plots)
        sections.append(("plots", "Plots", drawings))
    if document.picture is not None:
        sections.append(("picture", document.picture.heading, _image(document.picture)))
    for count, table in enumerate(document.tables, start=1):
        note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
        settings = f'<p class="note">{escape(document.settings)}</p>'
        sections.append((f"table-{count}", table.heading, settings + _html(table, count) + note))
    return Page(
        title=document.title,
        sections=[(name, escape(heading), content) for name, heading, content in sections],
        command=document.command,
        style=packaged("document.css"),
    )


def _figure(plot: LogLogPlot | BarPlot) -> str:
    drawing = bars(plot) if isinstance(plot, BarPlot) else log_log(plot)
    return f"<figure><figcaption><h3>{escape(plot.heading)}</h3></figcaption>{drawing}</figure>"


def _image(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode("ascii")
    description = escape(picture.description)
    return f'<img class="picture" alt="{description}" src="data:image/png;base64,{data}">'


def _html(table: Table, count: int) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    rows = [
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    ]
    return scrolling_table(table.heading, f"<tr>{head}</tr>", rows, f"cells-{count}")
