"""`kronfac results`: pages of the documentation, rendered from the committed runs of a race."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import numpy.typing as npt
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console

from kronfac_experiments.config import hint
from kronfac_experiments.pages.document import Document, Picture, Table
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, SKY, VERMILION, Style, png
from kronfac_experiments.race.command import COMMITTED, lanes_of, race
from kronfac_experiments.race.contestants import Contestant, contestants_named
from kronfac_experiments.race.plan import Lane, Terms, score
from kronfac_experiments.race.problem import Problem
from kronfac_experiments.race.problems import problems_named
from kronfac_experiments.race.records import SECONDS, STEP, TRAINING, VALIDATION, Run

STYLES = (
    Style(BLUE, "-", "o"),
    Style(VERMILION, "--", "s"),
    Style(GREEN, "-.", "^"),
    Style(BLACK, ":", "d"),
    Style("#CC79A7", "--", "x"),
    Style(SKY, "-", "v"),
)
COLUMNS = 3
SIZE = (3.6, 2.7)
"""Inches, of a panel."""
CEILING = 1.2
"""Losses are shown up to so many times the first one: of a run that diverged only that it did."""
POINTS = 60
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ResultPage:
    """A race with its page.

    Args:
        title: Of the page.
        problems: Problems or groups.
        contestants: Who races.
        terms: Of the race.
    """

    title: str
    problems: tuple[str, ...]
    contestants: tuple[str, ...]
    terms: Terms


PAGES = {
    "everyday": ResultPage(
        "Everyday training",
        ("cnn", "resnet", "conv_autoencoder", "gpt", "lstm", "tabular"),
        ("kfac", "adamw"),
        Terms({"seconds": 60.0}),
    ),
    "autoencoders": ResultPage(
        "The MNIST autoencoder",
        ("mnist",),
        ("kfac-paper", "kfac-paper-tridiagonal", "nag", "adamw"),
        Terms({"seconds": 300.0}, threads=2, schedule="constant"),
    ),
    "small_problems": ResultPage(
        "Ten small problems",
        ("small",),
        ("kfac", "adamw"),
        Terms({"seconds": 5.0}, weight_decays=(0.0,)),
    ),
    "physics": ResultPage(
        "Differential equations",
        ("physics",),
        ("lm", "kfac", "lbfgs", "soap", "adamw"),
        Terms({"seconds": 30.0}, weight_decays=(0.0,)),
    ),
}


@dataclass(frozen=True)
class ResultsConfig:
    """Render a page of results from the committed runs, as Markdown with a picture.

    Without --run only runs that are there are used: of every contestant those of the newest code.
    """

    name: Annotated[str, tyro.conf.Positional, hint("NAME", "none")] = ""
    """The page: everyday, autoencoders, small_problems or physics."""
    run: bool = False
    """Make the runs that today's code has not made; the command says how many hours that takes."""
    runs: Path = COMMITTED
    """Folder of the JSONL files."""
    output: Annotated[Path | None, hint("FILE.md", "docs/results/NAME.md")] = None
    """The page."""

    def __post_init__(self) -> None:
        if self.name not in PAGES:
            raise ValueError(f"NAME is one of {', '.join(PAGES)}; got {self.name!r}.")


def results_command(config: ResultsConfig) -> list[Path]:
    """Render the page; run what is missing first, if that is wanted."""
    console = Console(highlight=False, soft_wrap=True)
    page = PAGES[config.name]
    problems = problems_named(page.problems)
    contestants = contestants_named(page.contestants)
    if config.run:
        lanes = lanes_of(problems, contestants, page.terms, config.runs)
        runs = sum(lane.runs_left for own in lanes.values() for lane in own)
        hours = runs * page.terms.budget["seconds"] / 3600
        console.print(f"{runs} runs are missing: {hours:.1f} hours of optimizer time.")
        race(problems, contestants, page.terms, config.runs, console)
        terms = page.terms
    else:
        terms = replace(page.terms, codes=_newest(page, problems, contestants, config.runs))
    document = render(config.name, page, lanes_of(problems, contestants, terms, config.runs))
    document.show(console)
    return document.write_markdown(config.output or Path("docs/results") / f"{config.name}.md")


def _newest(
    page: ResultPage,
    problems: Sequence[Problem],
    contestants: Sequence[Contestant],
    folder: Path,
) -> dict[str, str]:
    """The code of the last run of each contestant in the files."""
    wanted = page.terms.budget, page.terms.schedule, page.terms.threads
    codes = {}
    for own in lanes_of(problems, contestants, page.terms, folder).values():
        for run in own[0].records:
            if (run.budget, run.schedule, run.threads) == wanted and run.seed < page.terms.seeds:
                codes[run.contestant] = run.code
    return codes


def render(name: str, page: ResultPage, lanes: dict[str, list[Lane]]) -> Document:
    """The page of a race."""
    raced = {problem: own for problem, own in lanes.items() if any(lane.runs for lane in own)}
    machines = {run.machine for own in raced.values() for lane in own for run in lane.runs}
    terms = page.terms
    names = {lane.records.path.name for own in lanes.values() for lane in own}
    files = ", ".join(f"[{name}](runs/{name})" for name in sorted(names))
    return Document(
        title=page.title,
        command=f"kronfac results {name}",
        settings=(
            f"{terms.budget['seconds']:g} s of optimizer time a run, {terms.seeds} seeds, {terms.threads} "
            f"thread(s), {'; '.join(sorted(filter(None, machines))) or 'unknown machine'}. "
            f"Raw runs: {files}."
        ),
        tables=[_scores(raced), _contestants(raced)],
        picture=draw(raced, terms.budget["seconds"]),
    )


def _scores(lanes: dict[str, list[Lane]]) -> Table:
    rows = []
    for name, own in lanes.items():
        found = {lane.contestant.label: _median(lane) for lane in own}
        best = min(found.values()) if all(map(math.isfinite, found.values())) else math.nan
        marks = [" !" if lane.on_the_edge else "" for lane in own]
        cells = [
            _cell(value, value == best) + mark
            for value, mark in zip(found.values(), marks, strict=True)
        ]
        rows.append((name, *cells))
    first = next(iter(lanes.values()), [])
    judged = {lane.problem.judged_by for own in lanes.values() for lane in own}
    what = "Training loss at the end" if judged == {"training"} else "Lowest validation loss"
    columns = ("problem", *(lane.contestant.label for lane in first))
    note = (
        "Median of the seeds; the lowest of a line is bold. ! marks a learning rate at the end of those "
        "tried, beyond which a better one may lie."
    )
    return Table(what, columns, rows, note)


def _median(lane: Lane) -> float:
    runs = lane.runs
    return median(score(lane.problem, run) for run in runs) if runs else math.inf


def _cell(value: float, best: bool) -> str:
    if math.isinf(value):
        return "–"
    return f"**{value:.3g}**" if best else f"{value:.3g}"


def _contestants(lanes: dict[str, list[Lane]]) -> Table:
    rows: dict[str, tuple[str, ...]] = {}
    for own in lanes.values():
        for lane in own:
            contestant, codes = lane.contestant, {run.code for run in lane.runs}
            grid = "; ".join(
                f"{name} {', '.join(f'{value:g}' for value in values)}"
                for name, values in contestant.grid.items()
            )
            setup = contestant.remark or "PyTorch's defaults"
            if codes:
                row = (contestant.label, setup, grid or "–", ", ".join(sorted(codes)))
                rows[contestant.label] = row
    columns = ("", "set up", "tuned over", "code")
    return Table("The contestants", columns, list(rows.values()), detail=True)


# ---------------------------------------------------------------------------------------------- picture


def draw(lanes: dict[str, list[Lane]], seconds: float) -> Picture:
    """What decides on each problem over the seconds of a run."""
    count = max(1, len(lanes))
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    scale = 1.8 if count == 1 else 1.0
    size = scale * SIZE[0] * columns, scale * SIZE[1] * rows + 0.4
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for own, axes in zip(lanes.values(), panels, strict=False):
        _panel(axes, own, seconds)
    for axes in panels[len(lanes) :]:
        axes.set_axis_off()
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=columns + 1, fontsize=8
    )
    description = (
        f"Loss over {seconds:g} seconds, a panel for each problem: medians of the seeds, bands from the "
        "least to the most."
    )
    return Picture("Loss over seconds", description, png(figure, dpi=110))


def _panel(axes: Axes, lanes: Sequence[Lane], seconds: float) -> None:
    problem = lanes[0].problem
    column = TRAINING if problem.judged_by == "training" else VALIDATION
    at = np.linspace(0, seconds, POINTS)
    for lane, style in zip(lanes, STYLES, strict=False):
        runs = [run for run in lane.runs if len(run.rows) > 1]
        if not runs:
            continue
        values = np.array([_along(run, column, at, seconds) for run in runs])
        values = values.clip(1e-12, CEILING * values[:, :1])
        axes.fill_between(
            at, values.min(axis=0), values.max(axis=0), color=style.colour, alpha=0.15, linewidth=0
        )
        axes.plot(
            at,
            np.median(values, axis=0),
            color=style.colour,
            linestyle=style.line,
            marker=style.marker,
            markersize=3,
            markevery=POINTS // 6,
            linewidth=1.3,
            label=lane.contestant.label,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title(f"{problem.name}: {problem.judged_by} loss", fontsize=9)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.25)


def _along(run: Run, column: int, at: Numbers, seconds: float) -> Numbers:
    """The numbers at these seconds; the clock of a run is stretched to its budget.

    Its steps were counted to fit the budget on a quiet machine.
    """
    rows = np.array(run.rows, dtype=np.float64)
    places = rows[:, SECONDS]
    if not run.message and rows[-1, STEP]:
        places = places * (seconds / places[-1])
    return np.interp(at, places, rows[:, column])
