"""The page about one or more runs, put together and written."""

import shlex
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from kronfac_experiments.pages.interactive import interactive
from kronfac_experiments.pages.page import Page
from kronfac_experiments.pages.styles import run_styles
from kronfac_experiments.report import sections
from kronfac_experiments.report.runs import Run, read_runs, run_folders
from kronfac_experiments.report.series import plot_data
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


def write_report(config: ReportConfig) -> Path:
    """Write the page about the runs and return where it is."""
    folders, others = run_folders(config.runs)
    if others:
        print(f"Left out, as no runs: {', '.join(map(str, others))}", file=sys.stderr)
    return page_of(read_runs(folders), config.command).write(config.output)


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
    note = f'<p class="note">{HOW_TO_READ}</p>'
    summary = f"{summary_table(ordered, swatches)}\n{note}\n{_notes(runs)}"
    return Page(
        title=_title(runs),
        verdict=verdict(ordered),
        sections=[("summary", "Summary", summary), *(part for part in parts if part is not None)],
        command=command,
        scripts=interactive(data),
    )


def _title(runs: list[Run]) -> str:
    problems = [run.setting("problem") for run in runs]
    names = ", ".join(dict.fromkeys(problem for problem in problems if problem))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"Training report: {names}, {count}" if names else f"Training report: {count}"


def _notes(runs: list[Run]) -> str:
    items = [f"<li>{escape(run.name)}: {escape(note)}.</li>" for run in runs for note in run.notes]
    return f'<ul class="warnings">{"".join(items)}</ul>' if items else ""
