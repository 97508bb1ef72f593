"""The rows as a table and as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kronfac_experiments.ablation.config import AblateConfig
from kronfac_experiments.ablation.rows import WHOLE, Row
from kronfac_experiments.ablation.trials import Trial, Trials, best_variant, or_infinite
from kronfac_experiments.pages.document import Document, Picture, Table
from kronfac_experiments.pages.drawn import BLACK, BLUE, VERMILION, png
from kronfac_experiments.progress import number

HEADINGS = ("", "section", "at ¼", "at ½", "at the end", "least – most", "ratio", "seconds")
EXPLANATION = (
    "Training error of the current parameters at a quarter, half and all of the iterations, median of the "
    f"seeds; ratio: of the error at the end to that of {WHOLE}, or of the row in brackets. A best variant "
    "marked ! is the first or last of those tried. Seconds are of this implementation, which computes "
    "Fisher products and statistics for every row but Nesterov's."
)


@dataclass(frozen=True)
class Line:
    """A line of the table: medians over the seeds."""

    row: str
    section: str
    variant: str
    """The best one, with ! if it is the first or the last of several."""
    iterations: int
    quarter: float
    """Error at a quarter of the iterations; NaN for averaged iterates."""
    half: float
    end: float
    least: float
    """Smallest of the errors at the end."""
    most: float
    against: str
    ratio: float
    """Error at the end over that of the row it is compared with, seed by seed."""
    seconds: float
    """Time of the steps."""


def lines_of(rows: Sequence[Row], trials: Trials, iterations: int) -> list[Line]:
    """A line for each row, the rows that they are compared with among them."""
    by_name = {row.name: row for row in rows}
    return [_line(row, by_name, trials, iterations) for row in rows]


def _line(row: Row, by_name: dict[str, Row], trials: Trials, iterations: int) -> Line:
    source = row if row.variants else by_name[row.against]
    own = _of_best(source, trials)
    ends = [_end(row, trial) for trial in own]
    other = by_name[row.against]
    others = [_end(other, trial) for trial in _of_best(other, trials)]
    quarter, half = (
        median(or_infinite(trial.errors[mark]) for trial in own) if row.variants else math.nan
        for mark in (0, 1)
    )
    return Line(
        row=row.name,
        section=row.section,
        variant=_marked(own[0].variant, source),
        iterations=iterations * row.stretch,
        quarter=quarter,
        half=half,
        end=median(ends),
        least=min(ends),
        most=max(ends),
        against=row.against,
        ratio=_ratio(ends, others),
        seconds=median(trial.seconds for trial in own),
    )


def _marked(variant: str, row: Row) -> str:
    tried = list(row.variants)
    return f"{variant} !" if len(tried) > 1 and variant in (tried[0], tried[-1]) else variant


def _ratio(ends: list[float], others: list[float]) -> float:
    """Median, seed by seed; NaN if a seed has none."""
    pairs = list(zip(ends, others, strict=True))
    if any(b in (0, math.inf) for _, b in pairs):
        return math.nan
    return median(a / b for a, b in pairs)


def _of_best(row: Row, trials: Trials) -> list[Trial]:
    """A trial a seed."""
    variant = best_variant(row, trials)
    own = [trial for trial in trials.values() if (trial.row, trial.variant) == (row.name, variant)]
    return sorted(own, key=lambda trial: trial.seed)


def _end(row: Row, trial: Trial) -> float:
    return trial.end if row.variants else or_infinite(trial.averaged)


def document(config: AblateConfig, command: str, lines: Sequence[Line]) -> Document:
    """The table and the picture."""
    return Document(
        title="K-FAC with one thing changed",
        command=command,
        settings=f"{config.setting}.",
        tables=[Table("Errors", HEADINGS, [_cells(line) for line in lines], EXPLANATION)],
        picture=Picture("All rows", "Errors of all rows", png(_draw(config, lines))),
    )


def _cells(line: Line) -> list[str]:
    errors = (line.quarter, line.half, line.end, line.least, line.most)
    quarter, half, end, least, most = ("diverged" if e == math.inf else number(e) for e in errors)
    other = "" if line.against == WHOLE else f" ({line.against})"
    ratio = "" if line.row == line.against else f"{number(line.ratio)}{other}"
    return [
        _name(line),
        line.section,
        quarter,
        half,
        end,
        f"{least}–{most}",
        ratio,
        f"{line.seconds:.1f}",
    ]


def _name(line: Line) -> str:
    return f"{line.row} (best: {line.variant})" if line.variant else line.row


def _draw(config: AblateConfig, lines: Sequence[Line]) -> Figure:
    figure = Figure(figsize=(11, 1.7 + 0.36 * len(lines)), layout="constrained")
    setting = config.setting.replace(", λ₀", ",\nλ₀")
    title = "K-FAC with one thing changed (squares: first-order, more iterations)"
    figure.suptitle(f"{title}\n{setting}", fontsize=10)
    axes = figure.subplots()
    for height, line in enumerate(reversed(lines)):
        if not math.isfinite(line.end):
            axes.text(0.02, height, "diverged", transform=axes.get_yaxis_transform(), va="center")
            continue
        longer = line.iterations > config.sizes.iterations
        colour, marker = (VERMILION, "s") if longer else (BLUE, "o")
        axes.plot([line.least, line.most], [height, height], color=colour, linewidth=2)
        axes.plot(line.end, height, marker, color=colour)
        right = line.most if line.most < math.inf else line.end
        axes.annotate(
            number(line.end), (right, height), (8, 0), textcoords="offset points", va="center",
            fontsize=8,
        )  # fmt: skip
        if line.row == WHOLE:
            axes.axvline(line.end, color=BLACK, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(lines)), [_name(line) for line in reversed(lines)], fontsize=9)
    axes.set_ylim(-0.7, len(lines) - 0.3)
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("training error at the end: median, least and most of the seeds", fontsize=9)
    axes.grid(True, axis="x", which="both", alpha=0.25)
    return figure
