"""Puts the page together and writes it."""

import json
import platform
import re
import shlex
import sys
from dataclasses import dataclass
from html import escape
from importlib.metadata import version
from pathlib import Path
from string import Template
from typing import Annotated, Any

import tyro
from plotly.offline import get_plotlyjs

from kronfac_experiments.report import sections
from kronfac_experiments.report.files import packaged, write_page
from kronfac_experiments.report.runs import Run, read_runs, run_folders
from kronfac_experiments.report.series import plot_data
from kronfac_experiments.report.styles import run_styles
from kronfac_experiments.report.tables import best_first, summary_table, verdict

DEFAULT_OUTPUT = Path("report.html")
HOW_TO_READ = """Best first. Errors are those of the last evaluation. <em>Averaged</em> is the training
error of the averaged parameters, <em>better of both</em> the smaller of the current and the averaged one.
<em>Cases</em> counts every training case as often as it was used; <em>seconds</em> are those of the
optimizer, without evaluation."""


@dataclass(frozen=True)
class ReportConfig:
    """Write one HTML page, which needs no network, about one or more runs."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Folders that `kronfac train` wrote, or folders of such; others are left out."""
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


@dataclass(frozen=True)
class Page:
    """What a page of this kind consists of; HTML where nothing else is said.

    Args:
        title: Text.
        verdict: The outcome in a sentence.
        summary: What stands on top.
        note: How to read it.
        sections: Anchor, heading and content of each.
        command: Text: what to type for the same page.
        data: What `page.js` draws, as `series.plot_data` makes it.
        warnings: Below the note.
    """

    title: str
    verdict: str
    summary: str
    note: str
    sections: list[tuple[str, str, str]]
    command: str
    data: dict[str, Any]
    warnings: str = ""

    @property
    def html(self) -> str:
        """The whole of it."""
        plotly = get_plotlyjs()
        return Template(packaged("page.html")).substitute(
            title=escape(self.title),
            css=packaged("page.css"),
            verdict=self.verdict,
            links="\n".join(
                f'<a href="#{anchor}">{heading}</a>' for anchor, heading, _ in self.sections
            ),
            summary=self.summary,
            note=self.note,
            notes=self.warnings,
            sections="\n".join(
                f'<section id="{anchor}">\n<h2>{heading}</h2>\n{content}\n</section>'
                for anchor, heading, content in self.sections
            ),
            command=escape(self.command),
            versions=escape(_versions(plotly)),
            data=_script_json(self.data),
            plotly=plotly,
            js=packaged("page.js"),
        )


def write_report(config: ReportConfig) -> Path:
    """Write the page about the runs and return where it is."""
    folders, others = run_folders(config.runs)
    if others:
        print(f"Left out, as no runs: {', '.join(map(str, others))}", file=sys.stderr)
    return write_page(page_of(read_runs(folders), config.command).html, config.output)


def page_of(runs: list[Run], command: str) -> Page:
    """The page about the runs."""
    data = plot_data(runs)
    parts = (
        sections.error_section(data),
        sections.trace_section(data),
        sections.time_section(runs),
        sections.picture_section(runs),
        sections.configuration_section(runs),
    )
    swatches = {
        run.name: style.swatch for run, style in zip(runs, run_styles(len(runs)), strict=True)
    }
    ordered = best_first(runs)
    return Page(
        title=_title(runs),
        verdict=verdict(ordered),
        summary=summary_table(ordered, swatches),
        note=HOW_TO_READ,
        sections=[part for part in parts if part is not None],
        command=command,
        data=data,
        warnings=_notes(runs),
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
