"""`kronfac results`: pages of the documentation, rendered from the committed runs of a race."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, stdev
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.console import Console

from kronfac import WhitenedMomentum
from kronfac.whitened_momentum import ParameterPlan
from kronfac_experiments.config import hint
from kronfac_experiments.pages.document import Document, Picture, Table
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, SKY, VERMILION, Style, png
from kronfac_experiments.race.command import COMMITTED, lanes_of, race
from kronfac_experiments.race.contestants import contestants_named
from kronfac_experiments.race.models import GPT, resnet50
from kronfac_experiments.race.plan import Lane, Terms, score
from kronfac_experiments.race.problems import problems_named
from kronfac_experiments.race.records import METRIC, SECONDS, STEP, TRAINING, VALIDATION, Run
from kronfac_experiments.run_directory import RunError

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
LEVEL = 1.01
"""A loss up to so many times another is level with it, or one within two standard errors."""
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ResultPage:
    """A race with its page.

    Args:
        title: Of the page.
        problems: Problems or groups.
        contestants: Who races; step costs are in units of the first one's.
        terms: Of the race.
        detailed: Whether the page also has spread, metric, settings, step cost, memory, and the loss and
            the metric over steps.
    """

    title: str
    problems: tuple[str, ...]
    contestants: tuple[str, ...]
    terms: Terms
    detailed: bool = False


PAGES = {
    "everyday": ResultPage(
        "Everyday training",
        ("networks",),
        ("adamw", "muon", "soap"),
        Terms(
            {"seconds": 30.0}, schedule="linear", weight_decays=(0.01, 0.1, 0.3), tune_fully=True
        ),
        detailed=True,
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
    terms = page.terms
    if config.run:
        lanes = lanes_of(problems, contestants, terms, config.runs)
        runs = sum(lane.runs_left for own in lanes.values() for lane in own)
        hours = runs * terms.budget["seconds"] / 3600
        console.print(f"{runs} runs are missing: {hours:.1f} hours of optimizer time.")
        race(problems, contestants, terms, config.runs, console)
    else:
        terms = replace(terms, any_code=True)
    lanes = lanes_of(problems, contestants, terms, config.runs)
    raced = {name: own for name, own in lanes.items() if any(lane.runs for lane in own)}
    if not raced:
        raise RunError(
            f"No runs of this race are in {config.runs}; make them: kronfac results {config.name} --run"
        )
    document = render(config.name, page, raced)
    document.show(console)
    return document.write_markdown(config.output or Path("docs/results") / f"{config.name}.md")


def render(name: str, page: ResultPage, lanes: dict[str, list[Lane]]) -> Document:
    """The page of a race."""
    machines = {run.machine for own in lanes.values() for lane in own for run in lane.runs}
    terms = page.terms
    names = {lane.records.path.name for own in lanes.values() for lane in own}
    files = ", ".join(f"[{name}](runs/{name})" for name in sorted(names))
    tables, pictures = [_scores(lanes)], [draw(lanes, terms.budget["seconds"])]
    if page.detailed:
        tables += [_beside_the_best(lanes), *_details(lanes), *_estimates()]
        pictures += [
            draw(lanes, terms.budget["seconds"], STEP),
            draw(lanes, terms.budget["seconds"], SECONDS, METRIC),
            draw(lanes, terms.budget["seconds"], STEP, METRIC),
        ]
    return Document(
        title=page.title,
        command=f"kronfac results {name}",
        settings=(
            f"{terms.budget['seconds']:g} s of optimizer time a run, {terms.seeds} seeds, {terms.threads} "
            f"thread(s), {'; '.join(sorted(filter(None, machines))) or 'unknown machine'}. "
            f"Raw runs: {files}."
        ),
        tables=[*tables, _contestants(lanes)],
        pictures=pictures,
    )


# ----------------------------------------------------------------------------------------------- tables


def _by_problem(
    heading: str,
    lanes: dict[str, list[Lane]],
    cell: Callable[[Lane, list[Lane]], str],
    note: str = "",
    detail: bool = True,
) -> Table:
    """A row for each problem, a column for each contestant; a cell also sees the others of its row."""
    labels = [lane.contestant.label for lane in next(iter(lanes.values()))]
    rows = [(name, *(cell(lane, own) for lane in own)) for name, own in lanes.items()]
    return Table(heading, ("problem", *labels), rows, note, detail)


def _scores(lanes: dict[str, list[Lane]]) -> Table:
    judged = {lane.problem.judged_by for own in lanes.values() for lane in own}
    what = "Training loss at the end" if judged == {"training"} else "Lowest validation loss"
    note = (
        "Median of the seeds; the lowest of a line is bold. ! marks a learning rate at the end of those "
        "tried, beyond which a better one may lie."
    )

    def cell(lane: Lane, own: list[Lane]) -> str:
        value, best = _median(lane), min(map(_median, own))
        shown = f"{value:.3g}" if math.isfinite(value) else "–"
        mark = " !" if lane.on_the_edge else ""
        return (f"**{shown}**" if value == best and len(own) > 1 else shown) + mark

    return _by_problem(what, lanes, cell, note, detail=False)


def _median(lane: Lane) -> float:
    scores = _seeds(lane)
    return median(scores) if scores else math.inf


def _seeds(lane: Lane) -> list[float]:
    """What decides, for each seed."""
    return [score(lane.problem, run) for run in lane.runs]


def _error(lane: Lane) -> float:
    """The standard error over the seeds; 0 where it can't be known."""
    scores = _seeds(lane)
    known = len(scores) > 1 and all(map(math.isfinite, scores))
    return stdev(scores) / math.sqrt(len(scores)) if known else 0.0


def _beside_the_best(lanes: dict[str, list[Lane]]) -> Table:
    """The loss of each of kronfac's optimizers over that of the best other one."""

    def peer(own: list[Lane]) -> Lane:
        return min((lane for lane in own if lane.contestant.code != "kronfac"), key=_median)

    def level(lane: Lane, own: list[Lane]) -> bool:
        best = peer(own)
        value, least = _median(lane), _median(best)
        return value <= LEVEL * least or value - least <= 2 * math.hypot(_error(lane), _error(best))

    def cell(lane: Lane, own: list[Lane]) -> str:
        ratio = _median(lane) / _median(peer(own))
        return f"**{ratio:.3f}**" if level(lane, own) else f"{ratio:.3f}"

    ours = {
        name: [lane for lane in own if lane.contestant.code == "kronfac"]
        for name, own in lanes.items()
    }
    labels = [lane.contestant.label for lane in next(iter(ours.values()))]
    rows = [
        (name, peer(own).contestant.label, *(cell(lane, own) for lane in ours[name]))
        for name, own in lanes.items()
    ]
    counts = [
        f"{label} on {sum(level(ours[name][k], own) for name, own in lanes.items())} of {len(lanes)}"
        for k, label in enumerate(labels)
    ]
    note = "Bold: ahead of the best peer or level with it, within 1 % or two standard errors" + (
        f": {', '.join(counts)}." if counts else "."
    )
    return Table("Loss over the best peer's", ("problem", "best peer", *labels), rows, note)


def _details(lanes: dict[str, list[Lane]]) -> list[Table]:
    def metric(lane: Lane, own: list[Lane]) -> str:
        lowest = [min(run.rows, key=lambda row: row[VALIDATION])[METRIC] for run in lane.runs]
        return f"{median(lowest):.3g}" if lowest else "–"

    def cost(lane: Lane, own: list[Lane]) -> str:
        batch = lane.problem.batches[0]
        mine, first = lane.cost(batch), own[0].cost(batch)
        return f"{mine.step / first.step:.2f}" if mine and first else "–"

    def memory(lane: Lane, own: list[Lane]) -> str:
        found = [run.state_bytes / run.weight_bytes for run in lane.runs if run.weight_bytes]
        return f"{max(found):.2f}" if found else "–"

    def chosen(lane: Lane, own: list[Lane]) -> str:
        settings = lane.runs[0].settings if lane.runs else {}
        return ", ".join(
            f"{name} {value:g}" for name, value in settings.items() if value is not None
        )

    first = next(iter(lanes.values()))[0].contestant.label
    return [
        _by_problem("Standard error of the loss", lanes, lambda lane, own: f"{_error(lane):.2g}"),
        _by_problem(
            "Metric at the lowest validation loss",
            lanes,
            metric,
            "; ".join(f"{name}: {own[0].problem.metric_name}" for name, own in lanes.items()) + ".",
        ),
        _by_problem(
            f"Cost of a step over {first}'s",
            lanes,
            cost,
            "At the smallest mini-batch, measured once, contestants taking turns.",
        ),
        _by_problem("Bytes of state over bytes of weights", lanes, memory),
        _by_problem("Settings", lanes, chosen, "As tuned, on a seed that is in no race."),
    ]


def _estimates() -> list[Table]:
    """What `WhitenedMomentum.plan` says of networks that are too large for this race."""
    with torch.device("meta"):
        networks = {
            "ResNet-50, 64 images of 224 × 224 pixels": (resnet50(), torch.zeros(64, 3, 224, 224)),
            "GPT of 18 layers, width 2,048 and 50,257 symbols, 32 windows of 1,024": (
                GPT(50_257, 1024, 2048, 18, 16),
                torch.zeros(32, 1024, dtype=torch.int64),
            ),
        }
    tables = []
    for name, (model, example) in networks.items():
        plan = WhitenedMomentum(model).plan(example)
        alike: dict[tuple[str, str], list[ParameterPlan]] = {}
        for row in plan.rows:
            shape = " × ".join(map(str, row.shape))
            if row.products:
                alike.setdefault((shape, row.method), []).append(row)
        products = sum(row.products for row in plan.rows)
        rows = [
            (
                *kind, str(len(some)),
                f"{100 * sum(row.products for row in some) / products:.1f}",
                f"{100 * sum(row.added for row in some) / products:.1f}",
                f"{sum(row.bytes for row in some) / 1e6:,.1f}",
            )
            for kind, some in alike.items()
        ]  # fmt: skip
        size = sum(p.numel() for p in model.parameters())
        note = (
            f"{size / 1e6:,.0f} million parameters. All together: {plan.cost:.2f} × the operations of "
            f"AdamW's step, counting products with weights only; state of {plan.state:.2f} × the weights."
        )
        columns = ("weights", "method", "number", "their products, %", "added, %", "state, MB")
        tables.append(Table(f"Estimate: {name}", columns, rows, note, detail=True))
    return tables


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


# ---------------------------------------------------------------------------------------------- pictures


def draw(
    lanes: dict[str, list[Lane]], seconds: float, along: int = SECONDS, shown: int | None = None
) -> Picture:
    """A panel for each problem: what decides on it, or its metric, over seconds or steps."""
    count = max(1, len(lanes))
    columns = min(COLUMNS, count)
    rows = -(-count // columns)
    scale = 1.8 if count == 1 else 1.0
    size = scale * SIZE[0] * columns, scale * SIZE[1] * rows + 0.4
    figure = Figure(figsize=size, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for own, axes in zip(lanes.values(), panels, strict=False):
        _panel(axes, own, seconds, along, shown)
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
    heading = (
        f"{'Loss' if shown is None else 'Metric'} over {'steps' if along == STEP else 'seconds'}"
    )
    description = (
        f"{heading}, a panel for each problem: medians of the seeds, bands from the least to the most, in "
        f"{seconds:g} seconds."
    )
    return Picture(heading, description, png(figure, dpi=110))


def _panel(
    axes: Axes, lanes: Sequence[Lane], seconds: float, along: int, shown: int | None
) -> None:
    problem = lanes[0].problem
    column = TRAINING if problem.judged_by == "training" else VALIDATION
    column = column if shown is None else shown
    for lane, style in zip(lanes, STYLES, strict=False):
        runs = [run for run in lane.runs if len(run.rows) > 1]
        if not runs:
            continue
        end = seconds if along == SECONDS else max(run.rows[-1][STEP] for run in runs)
        at = np.linspace(0, end, POINTS)
        values = np.array([_values(run, column, along, at) for run in runs])
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
    what = f"{problem.judged_by} loss" if shown is None else problem.metric_name
    axes.set_title(f"{problem.name}: {what}", fontsize=9)
    axes.set_xlabel("steps" if along == STEP else "seconds", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.grid(True, alpha=0.25)


def _values(run: Run, column: int, along: int, at: Numbers) -> Numbers:
    """The numbers at these seconds or steps.

    A run's clock is stretched to its budget: its steps were counted to fit it on a quiet machine.
    """
    rows = np.array(run.rows, dtype=np.float64)
    places = rows[:, along]
    if along == SECONDS and not run.message and rows[-1, STEP]:
        places = places * (at[-1] / places[-1])
    return np.interp(at, places, rows[:, column])
