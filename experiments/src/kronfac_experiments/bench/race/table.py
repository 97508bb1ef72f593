"""The standings in a terminal and as Markdown, with all that is needed to read them."""

import os
from collections.abc import Iterator

from kronfac_experiments.bench.race.config import TUNING_SEED
from kronfac_experiments.bench.race.contests import Contest, contests_named
from kronfac_experiments.bench.race.peers import KFAC, in_words
from kronfac_experiments.bench.race.running import Race
from kronfac_experiments.bench.race.standings import HEADINGS, lines_of
from kronfac_experiments.config import DEFAULT_BATCH
from kronfac_experiments.machine import machine, versions
from kronfac_experiments.pages.document import Document, Table
from kronfac_experiments.progress import number


def explanation(race: Race) -> str:
    """How it was measured."""
    sizes, config = race.config.sizes, race.config
    made = ", ".join(f"{name} {version}" for name, version in versions().items())
    return (
        f"Median (least – most) of {sizes.seeds} seed(s) from 0; in each seed all start from the same "
        f"parameters. Mini-batches of {DEFAULT_BATCH} where nothing else is said. Peers were tuned on seed "
        f"{TUNING_SEED}, six points of a grid for {sizes.tune_seconds:g} s each, by time to the last "
        "target or else by error at the end; ! marks a choice at the end of its grid. K-FAC was not tuned. "
        "The error is that of the training cases, the first "
        f"{sizes.evaluation_cases:,}, the smaller one of current and averaged parameters (decay 0.99, for "
        "everyone); between evaluations its logarithm is taken for linear. Seconds are those of steps and "
        "averaging, without evaluation and drawing of mini-batches. Faster by: seconds over K-FAC's, seed "
        f"by seed. {config.threads} thread(s) of {os.cpu_count()} processors, {machine()['processor']}; "
        f"float32; {made}."
    )


def title(contest: Contest) -> str:
    """Problem and targets."""
    targets = " and ".join(number(target) for target in contest.targets)
    return f"{contest.problem}: training errors {targets} ({contest.why})"


def remarks(race: Race) -> Iterator[tuple[str, str, str]]:
    """Label, how it is set up, and the grid of each peer."""
    for peer in race.config.peers:
        package = peer.package
        source = f"{', '.join(package.requirements)} ({package.licence})" if package else ""
        setup = "; ".join(text for text in (peer.remark, source) if text)
        grid = "not tuned" if len(peer.grid) == 1 else "; ".join(map(in_words, peer.grid))
        yield peer.label, setup, grid


def document(race: Race) -> Document:
    """A table for each problem, and the grids."""
    contests = contests_named(race.config.problems)
    tables = [
        Table(
            title(contest),
            HEADINGS,
            [line.cells for line in lines_of(race, contest)],
            note=explanation(race) if contest is contests[-1] else "",
        )
        for contest in contests
    ]
    grids = Table("The grids", ("", "set up", "grid"), list(remarks(race)), detail=True)
    return Document(
        title="The race",
        command=race.config.command,
        settings=f"Seconds, iterations and cases to fixed training errors: {KFAC.label} and its peers.",
        tables=[*tables, grids],
    )
