"""The race as one HTML page that needs no network: a table and the curves of each problem."""

from html import escape
from pathlib import Path
from typing import Any

from kronfac_experiments.bench.race.contests import Contest, contests_named
from kronfac_experiments.bench.race.peers import Peer
from kronfac_experiments.bench.race.running import Race
from kronfac_experiments.bench.race.standings import HEADINGS, lines_of
from kronfac_experiments.bench.race.table import explanation, remarks, title
from kronfac_experiments.pages.interactive import interactive
from kronfac_experiments.pages.page import Page, scrolling_table
from kronfac_experiments.pages.styles import RunStyle, run_styles
from kronfac_experiments.report.runs import Run
from kronfac_experiments.report.sections import axis_controls, plot
from kronfac_experiments.report.series import plot_data

PAGE = "race.html"


def write(race: Race) -> Path:
    """Write it, and say where it is."""
    contests = contests_named(race.config.problems)
    styles = dict(
        zip((p.name for p in race.config.peers), run_styles(len(race.config.peers)), strict=True)
    )
    data = _data(race, contests, styles)
    sections = [(c.problem, c.problem, _section(race, c, styles)) for c in contests]
    sections.append(("grids", "The grids", _grids(race)))
    controls = "".join(axis_controls(data["axes"]))
    note = f'<p class="note">{escape(explanation(race))}</p>'
    summary = f'<div class="controls">{controls}</div>\n{note}'
    page = Page(
        title=f"The race: {', '.join(contest.problem for contest in contests)}",
        verdict="Seconds, iterations and cases to fixed training errors, K-FAC and its peers.",
        sections=[("summary", "Summary", summary), *sections],
        command=race.config.command,
        scripts=interactive(data),
    )
    return page.write(race.config.folder / PAGE)


def _data(race: Race, contests: tuple[Contest, ...], styles: dict[str, RunStyle]) -> dict[str, Any]:
    """A curve for every run of the race, the colour its optimizer's."""
    runs: list[Run] = []
    of: list[tuple[Contest, Peer]] = []
    for contest in contests:
        for peer in race.present:
            for trial in race.found(contest, "race", peer):
                names = ("iteration", "cases", "seconds", "train_error")
                rows = tuple(dict(zip(names, row, strict=True)) for row in trial.rows)
                name = f"{peer.label}, seed {trial.seed}"
                runs.append(Run(name, {}, rows, None, (), bool(trial.message)))
                of.append((contest, peer))
    data = plot_data(runs) if runs else {"axes": [], "runs": []}
    data["axes"] = sorted(data["axes"], key=["seconds", "iteration", "cases"].index)
    for run, (contest, peer) in zip(data["runs"], of, strict=True):
        style = styles[peer.name]
        run |= {"group": contest.problem, "colour": style.colour, "symbol": style.symbol}
    return data


def _section(race: Race, contest: Contest, styles: dict[str, RunStyle]) -> str:
    label = f"Training error of every run on {contest.problem}; the table has what it comes to."
    rows = []
    for line in lines_of(race, contest):
        name, *cells = map(escape, line.cells)
        swatch = styles[line.peer.name].swatch
        rows.append(
            f'<tr><th scope="row"><div class="run">{swatch}<span class="run-name">{name}</span></div>'
            + "</th>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    head = "".join(f'<th scope="col">{heading}</th>' for heading in HEADINGS)
    table = scrolling_table(title(contest), f"<tr>{head}</tr>", rows, f"table-{contest.problem}")
    drawn = plot(f"errors-{contest.problem}", label, errors=contest.problem)
    return f'<p class="note">{escape(title(contest))}</p>{table}{drawn}'


def _grids(race: Race) -> str:
    rows = [
        f'<tr><th scope="row">{escape(label)}</th><td>{escape(setup)}</td><td>{escape(grid)}</td></tr>'
        for label, setup, grid in remarks(race)
    ]
    head = '<tr><th scope="col"></th><th scope="col">set up</th><th scope="col">grid</th></tr>'
    return scrolling_table("Grids", head, rows, "grids-table")
