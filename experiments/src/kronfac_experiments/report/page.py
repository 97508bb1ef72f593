"""`kronfac report RUN…`: what runs did, as one HTML page that needs no network."""

import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from kronfac_experiments.pages.document import Document, Picture, Table
from kronfac_experiments.report import figures
from kronfac_experiments.report.runs import Run, read_runs, run_folders

DEFAULT_OUTPUT = Path("report.html")
MISSING = "—"
HOW_TO_READ = (
    "Best first. Errors are those of the last evaluation. Averaged is the training error of the averaged "
    "parameters, better of both the smaller of the current and the averaged one. Cases counts every "
    "training case as often as it was used; seconds are those of the optimizer, without evaluation."
)
SUMMARY_COLUMNS = (
    "run",
    "training error",
    "averaged",
    "better of both",
    "test error",
    "iterations",
    "cases",
    "seconds",
    "problem",
    "optimizer",
)
ERRORS_ARE = (
    "The error of autoencoders is the squared reconstruction error a case, summed over pixels; that of "
    "classifiers is the percentage of wrong answers. The thick line of a colour is the training error, the "
    "pale one the test error, the thin one that of averaged parameters."
)


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


def write_report(config: ReportConfig) -> Path:
    """Write the page about the runs and return where it is."""
    folders, others = run_folders(config.runs)
    if others:
        print(f"Left out, as no runs: {', '.join(map(str, others))}", file=sys.stderr)
    words = " ".join(["report", *(shlex.quote(str(run)) for run in config.runs)])
    return page_of(read_runs(folders), f"kronfac {words}").write_html(config.output)


def page_of(runs: list[Run], command: str) -> Document:
    """The page about the runs."""
    ordered = best_first(runs)
    timed = [run for run in runs if run.parts]
    names = ", ".join(dict.fromkeys(run.config["problem"] for run in runs if run.config))
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    return Document(
        title=f"Training report: {names}, {count}" if names else f"Training report: {count}",
        command=command,
        settings=verdict(ordered),
        tables=[
            _summary(ordered),
            *([_parts(timed)] if timed else []),
            *([_configuration(runs)] if any(run.config for run in runs) else []),
        ],
        pictures=_pictures(runs),
    )


def best_first(runs: list[Run]) -> list[Run]:
    """By training error within a problem, since errors of two problems cannot be compared.

    What diverged comes after what did not, what was never evaluated last.
    """
    problems = list(dict.fromkeys(run.config.get("problem") for run in runs))

    def key(run: Run) -> tuple[int, bool, float]:
        error = run.better_error
        place = problems.index(run.config.get("problem"))
        return place, error is None, math.inf if error is None else error

    return sorted(runs, key=key)


def verdict(runs: list[Run]) -> str:
    """The outcome in a sentence for each problem; `runs` are best first."""
    sentences = []
    problems = dict.fromkeys(run.config.get("problem") for run in runs)
    for problem in problems:
        best, *others = (run for run in runs if run.config.get("problem") == problem)
        error = best.better_error
        if error is None or not math.isfinite(error):
            sentences.append("No run has a finite training error yet.")
            continue
        what = "Lowest" if others else "Last"
        where = f" on {problem}" if problem else ""
        sentence = f"{what} training error{where}: {number(error)} by {best.name}"
        runner_up = others[0].better_error if others else None
        if runner_up is not None and math.isfinite(runner_up):
            sentence += f"; the next, {others[0].name}, ended at {number(runner_up)}"
        sentences.append(sentence + ".")
    if len(problems) > 1:
        sentences.append("Errors of different problems cannot be compared.")
    return " ".join(dict.fromkeys(sentences))


def _summary(runs: list[Run]) -> Table:
    rows = []
    for run in runs:
        errors = run.last("train_error"), run.last("averaged_train_error"), run.better_error
        words = [run.config.get(name) for name in ("optimizer", "inverse", "preset")]
        rows.append(
            (
                run.name,
                *map(number, (*errors, run.last("test_error"))),
                *(whole(run.last(name)) for name in ("iteration", "cases")),
                number(run.last("seconds")),
                run.config.get("problem", MISSING),
                ", ".join(filter(None, words)) or MISSING,
            )
        )
    notes = [f"{run.name}: {note}." for run in runs for note in run.notes]
    return Table("Summary", SUMMARY_COLUMNS, rows, " ".join([HOW_TO_READ, *notes]))


def _parts(runs: list[Run]) -> Table:
    """Milliseconds an iteration: a row a part, a column a run."""
    names = dict.fromkeys(part for run in runs for part in run.parts)
    rows = [
        (name.replace("_", " "), *(number(run.parts.get(name)) for run in runs)) for name in names
    ]
    rows.append(("together", *(number(sum(run.parts.values())) for run in runs)))
    columns = ("part", *(run.name for run in runs))
    return Table("Time by part", columns, rows, "Milliseconds an iteration.")


def _configuration(runs: list[Run]) -> Table:
    """A row a setting, a column a run; rows that are not the same in all runs are marked."""
    rows = []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [run.config.get(key, MISSING) for run in runs]
        rows.append((f"≠ {key}" if len(set(values)) > 1 else key, *values))
    return Table("Configuration", ("setting", *(run.name for run in runs)), rows)


def _pictures(runs: list[Run]) -> list[Picture]:
    drawn = [
        ("Error", ERRORS_ARE, figures.errors(runs)),
        ("Step by step", "Damping, coefficients, reduction ratio and loss.", figures.traces(runs)),
    ]
    return [
        Picture(heading, description, png) for heading, description, png in drawn if png is not None
    ]


def number(value: float | None) -> str:
    """Four significant digits, or words."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "not finite"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        digits = 3 - (math.floor(math.log10(abs(value))) if value else 0)
        return f"{value:,.{max(digits, 0)}f}"
    return f"{value:.3e}"


def whole(value: float | None) -> str:
    """With commas, or words."""
    return f"{value:,.0f}" if value is not None and math.isfinite(value) else number(value)
