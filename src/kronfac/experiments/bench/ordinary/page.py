"""What the comparison leaves behind: one HTML page that needs nothing else, and a Markdown file."""

import base64
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from string import Template

from kronfac.experiments.bench.ordinary import plot
from kronfac.experiments.bench.ordinary.config import OrdinaryConfig
from kronfac.experiments.bench.ordinary.problems import PROBLEMS
from kronfac.experiments.bench.ordinary.score import Line, summary
from kronfac.experiments.bench.ordinary.table import (
    Table,
    loss_table,
    settings,
    tuning_table,
    validation_table,
)
from kronfac.experiments.bench.ordinary.trials import Trials
from kronfac.experiments.machine import machine, versions
from kronfac.experiments.run_directory import write_atomically

PAGE = "ordinary.html"
TITLE = "K-FAC as it comes, AdamW tuned: ten ordinary problems in equal seconds"


def write_page(config: OrdinaryConfig, lines: Sequence[Line], trials: Trials) -> Path:
    """The page; where it is."""
    file = resources.files(__package__).joinpath("page.html")
    page = Template(file.read_text(encoding="utf-8")).substitute(
        title=escape(TITLE),
        summary=escape(summary(lines)),
        losses=_html(loss_table(lines)),
        plots="\n".join(_figure(config, line, trials) for line in lines),
        errors=_html(validation_table(lines)),
        tuning=_html(tuning_table(lines, trials)),
        settings=escape(settings(config)),
        machine=escape(_machine()),
        command=escape(config.command),
    )
    path = config.folder / PAGE
    write_atomically(path, lambda stream: stream.write(page.encode()))
    return path


def write_markdown(
    path: Path, config: OrdinaryConfig, lines: Sequence[Line], trials: Trials
) -> list[Path]:
    """The same as text, with the plots in a picture beside it; where both are."""
    picture = path.with_suffix(".png")
    problems = [f"- **{line.problem}**: {PROBLEMS[line.problem].description}" for line in lines]
    parts = [
        f"# {TITLE}",
        summary(lines),
        f"    {config.command}",
        _markdown(loss_table(lines)),
        f"![training loss over seconds, a plot for each problem]({picture.name})",
        _markdown(validation_table(lines)),
        "## The problems",
        "\n".join(problems),
        "## Settings",
        settings(config),
        _machine(),
        _markdown(tuning_table(lines, trials)),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n\n".join(parts) + "\n"
    write_atomically(path, lambda stream: stream.write(text.encode()))
    image = plot.png(lines, trials, config.duration)
    write_atomically(picture, lambda stream: stream.write(image))
    return [path, picture]


def _figure(config: OrdinaryConfig, line: Line, trials: Trials) -> str:
    image = base64.b64encode(plot.svg(line, trials, config.duration)).decode("ascii")
    alt = f"{line.problem}: training loss of K-FAC and AdamW over {config.duration:g} seconds"
    caption = f"{line.problem}: {PROBLEMS[line.problem].description}"
    return (
        f'<figure><img alt="{escape(alt)}" src="data:image/svg+xml;base64,{image}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _html(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in table.headings)
    body = "\n".join(
        f'<tr><th scope="row">{escape(first)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in rest)
        + "</tr>"
        for first, *rest in table.rows
    )
    return (
        f"<h2>{escape(table.title)}</h2>\n"
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>\n'
        f'<p class="note">{escape(table.note)}</p>'
    )


def _markdown(table: Table) -> str:
    rows = [table.headings, ("---",) * len(table.headings), *table.rows]
    cells = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"## {table.title}\n\n{cells}\n\n{table.note}"


def _machine() -> str:
    """Versions and machine, in a line."""
    known = versions() | {name: str(value) for name, value in machine().items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in known.items()) + "."
