"""Puts the page together and writes it."""

import json
import platform
import re
import shlex
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Annotated

import tyro
from plotly.offline import get_plotlyjs

from kronfac.experiments.report import sections
from kronfac.experiments.report.files import packaged, write_page
from kronfac.experiments.report.runs import Run, read_runs
from kronfac.experiments.report.series import plot_data
from kronfac.experiments.report.styles import run_styles
from kronfac.experiments.report.tables import best_first, summary_table, verdict

DEFAULT_OUTPUT = Path("report.html")


@dataclass(frozen=True)
class ReportConfig:
    """Write one HTML page, which needs no network, about one or more runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders that `kronfac train` wrote."""
    output: Path = DEFAULT_OUTPUT
    """The page."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("The report needs at least one run folder, got none.")

    @property
    def command(self) -> str:
        """What to type for the same page."""
        words = ["kronfac", "report", *map(str, self.runs)]
        if self.output != DEFAULT_OUTPUT:
            words += ["--output", str(self.output)]
        return shlex.join(words)


def write_report(config: ReportConfig) -> Path:
    """Write the page and return where it is; an earlier one is replaced at once or not at all."""
    return write_page(render(read_runs(config.runs), config.command), config.output)


def render(runs: list[Run], command: str) -> str:
    """The whole page."""
    data = plot_data(runs)
    parts = (
        sections.error_section(data),
        sections.trace_section(data),
        sections.time_section(runs),
        sections.picture_section(runs),
        sections.configuration_section(runs),
    )
    present = [part for part in parts if part is not None]
    plotly = get_plotlyjs()
    swatches = {
        run.name: style.swatch for run, style in zip(runs, run_styles(len(runs)), strict=True)
    }
    ordered = best_first(runs)
    return Template(packaged("page.html")).substitute(
        title=escape(_title(runs)),
        css=packaged("page.css"),
        verdict=verdict(ordered),
        links="\n".join(f'<a href="#{anchor}">{heading}</a>' for anchor, heading, _ in present),
        summary=summary_table(ordered, swatches),
        notes=_notes(runs),
        sections="\n".join(
            f'<section id="{anchor}">\n<h2>{heading}</h2>\n{content}\n</section>'
            for anchor, heading, content in present
        ),
        command=escape(command),
        versions=escape(_versions(plotly)),
        data=_script_json(data),
        plotly=plotly,
        js=packaged("page.js"),
    )


def _title(runs: list[Run]) -> str:
    problems = [run.setting("problem") for run in runs]
    names = ", ".join(dict.fromkeys(problem for problem in problems if problem))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"Training report: {names}, {count}" if names else f"Training report: {count}"


def _notes(runs: list[Run]) -> str:
    items = [f"<li>{escape(run.name)}: {escape(note)}.</li>" for run in runs for note in run.notes]
    return f'<ul class="warnings">{"".join(items)}</ul>' if items else ""


def _versions(plotly: str) -> str:
    found = re.search(r"plotly\.js v([\d.]+)", plotly[:500])
    drawn = f"plotly.js {found[1]}" if found else "plotly.js"
    return f"kronfac {version('kronfac')}, {drawn}, Python {platform.python_version()}"


def _script_json(data: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
