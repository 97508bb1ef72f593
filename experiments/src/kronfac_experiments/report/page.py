"""The page about one or more runs, put together and written."""

import base64
import shlex
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated

import tyro

from kronfac_experiments.pages.page import Page
from kronfac_experiments.report import figures
from kronfac_experiments.report.runs import Run, read_runs, run_folders
from kronfac_experiments.report.tables import (
    best_first,
    configuration_table,
    parts_table,
    summary_table,
    verdict,
)

DEFAULT_OUTPUT = Path("report.html")
HOW_TO_READ = """Best first. Errors are those of the last evaluation. <em>Averaged</em> is the training
error of the averaged parameters, <em>better of both</em> the smaller of the current and the averaged one.
<em>Cases</em> counts every training case as often as it was used; <em>seconds</em> are those of the
optimizer, without evaluation."""
Section = tuple[str, str, str]
"""Anchor, heading and HTML."""


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
        """The command for the same page."""
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
    colours = {run.name: figures.line_of(index)[0] for index, run in enumerate(runs)}
    ordered = best_first(runs)
    note = f'<p class="note">{HOW_TO_READ}</p>'
    summary = f"{summary_table(ordered, colours)}\n{note}\n{_notes(runs)}"
    parts = (_errors(runs), _traces(runs), _time(runs), _pictures(runs), _configuration(runs))
    return Page(
        title=_title(runs),
        verdict=verdict(ordered),
        sections=[("summary", "Summary", summary), *filter(None, parts)],
        command=command,
    )


def _errors(runs: list[Run]) -> Section:
    drawn = figures.errors(runs)
    if drawn is None:
        return "errors", "Error", '<p class="note">No error has been evaluated yet.</p>'
    note = (
        '<p class="note">The error of autoencoders is the squared reconstruction error a case, summed '
        "over pixels; that of classifiers is the percentage of wrong answers. The thick line of a colour "
        "is the training error, the pale one the test error, the thin one that of averaged parameters.</p>"
    )
    label = "Error curves of the runs; the last values are in the summary table."
    return "errors", "Error", _image(drawn, label) + note


def _traces(runs: list[Run]) -> Section | None:
    drawn = figures.traces(runs)
    if drawn is None:
        return None
    label = "Damping, coefficients, reduction ratio and loss of the runs by iteration"
    return "steps", "Step by step", _image(drawn, label)


def _time(runs: list[Run]) -> Section | None:
    timed = [run for run in runs if run.parts]
    return ("time", "Time by part", parts_table(timed)) if timed else None


def _pictures(runs: list[Run]) -> Section | None:
    drawn = {run.name: image for run in runs if (image := figures.gallery(run)) is not None}
    if not drawn:
        return None
    note = '<p class="note">Test cases on top, below them what the network made of them.</p>'
    galleries = "".join(
        f"<h3>{escape(name)}</h3>{_image(image, f'Reconstructions by {name}')}"
        for name, image in drawn.items()
    )
    return "pictures", "Reconstructions", note + galleries


def _configuration(runs: list[Run]) -> Section | None:
    if not any(run.config for run in runs):
        return None
    return "configuration", "Configuration", configuration_table(runs)


def _image(content: bytes, label: str) -> str:
    data = base64.b64encode(content).decode("ascii")
    return f'<img alt="{escape(label)}" src="data:image/png;base64,{data}">'


def _title(runs: list[Run]) -> str:
    problems = [run.setting("problem") for run in runs]
    names = ", ".join(dict.fromkeys(problem for problem in problems if problem))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return f"Training report: {names}, {count}" if names else f"Training report: {count}"


def _notes(runs: list[Run]) -> str:
    items = [f"<li>{escape(run.name)}: {escape(note)}.</li>" for run in runs for note in run.notes]
    return f'<ul class="warnings">{"".join(items)}</ul>' if items else ""
