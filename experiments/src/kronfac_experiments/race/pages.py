"""`kronfac results`: pages of the documentation, rendered from the committed runs of a race."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from kronfac_experiments.options import hint
from kronfac_experiments.pages.document import Document
from kronfac_experiments.race import tables
from kronfac_experiments.race.command import COMMITTED, lanes_of, race
from kronfac_experiments.race.contestants import CONTESTANTS
from kronfac_experiments.race.pictures import draw
from kronfac_experiments.race.plan import Terms
from kronfac_experiments.race.problems import problems_named
from kronfac_experiments.race.records import METRIC, SECONDS, STEP
from kronfac_experiments.run_directory import RunError


@dataclass(frozen=True)
class ResultPage:
    """A race with its page.

    Args:
        title: Of the page.
        problems: Problems or groups.
        contestants: Who races; step costs are in units of the first one's.
        terms: Of the race.
        chose: Problems on which the constants of kronfac's optimizer were chosen. With some, the page also
            compares that optimizer with its peers, and has step costs, memory and settings.
    """

    title: str
    problems: tuple[str, ...]
    contestants: tuple[str, ...]
    terms: Terms
    chose: tuple[str, ...] = ()


PAGES = {
    "everyday": ResultPage(
        "Everyday training",
        ("networks",),
        ("adamw", "muon", "soap", "ours", "ours-untuned", "ours-without-a"),
        Terms(
            {"seconds": 30.0}, schedule="linear", weight_decays=(0.01, 0.1, 0.3), tune_fully=True
        ),
        chose=("cnn", "resnet", "conv_autoencoder", "gpt", "lstm", "tabular"),
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
    """Render the page; run what is missing first, if that is wanted.

    Raises:
        RunError: there is no run.
    """
    console = Console(highlight=False, soft_wrap=True)
    page = PAGES[config.name]
    problems = problems_named(page.problems)
    contestants = [CONTESTANTS[name] for name in page.contestants]
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
    if not any(lane.runs for own in lanes.values() for lane in own):
        raise RunError(
            f"No runs of this race are in {config.runs}; make them: kronfac results {config.name} --run"
        )
    document = render(config.name, page, lanes)
    document.show(console)
    return document.write_markdown(config.output or Path("docs/results") / f"{config.name}.md")


def render(name: str, page: ResultPage, lanes: tables.Race) -> Document:
    """The page of a race."""
    machines = {run.machine for own in lanes.values() for lane in own for run in lane.runs}
    terms, seconds = page.terms, page.terms.budget["seconds"]
    names = {lane.records.path.name for own in lanes.values() for lane in own}
    files = ", ".join(f"[{name}](runs/{name})" for name in sorted(names))
    shown: list[tuple[int, int | None]] = [(SECONDS, None)]
    if page.chose:
        shown += [(STEP, None), (SECONDS, METRIC), (STEP, METRIC)]
    return Document(
        title=page.title,
        command=f"kronfac results {name}",
        settings=(
            f"{seconds:g} s of optimizer time a run, {terms.seeds} seeds, {terms.threads} thread(s), "
            f"{terms.schedule} schedule, {'; '.join(sorted(filter(None, machines))) or 'unknown machine'}. "
            f"Raw runs: {files}."
        ),
        tables=[
            tables.scores(lanes),
            *([*tables.details(lanes, page.chose), *tables.estimates()] if page.chose else []),
            tables.contestants(lanes),
        ],
        pictures=[draw(lanes, seconds, *what) for what in shown],
    )
