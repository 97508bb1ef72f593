"""Runs the race on networks, shows and writes all of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kronfac_experiments.bench.race.config import RaceConfig
from kronfac_experiments.bench.race.networks.network_race import NetworkRace
from kronfac_experiments.bench.race.networks.picture import draw
from kronfac_experiments.bench.race.networks.racers import racers_named
from kronfac_experiments.bench.race.networks.running import run_networks
from kronfac_experiments.bench.race.networks.tables import settings, tables
from kronfac_experiments.pages.csv_files import write_csv
from kronfac_experiments.pages.document import Document
from kronfac_experiments.pages.publish import publish

CURVES = "networks.csv"


@dataclass(frozen=True)
class CurveRow:
    """An evaluation of a run, for a CSV file."""

    problem: str
    optimizer: str
    phase: str
    lr: float | None
    batch: int
    seed: int
    step: int
    examples: int
    seconds: float
    training_loss: float
    validation_loss: float
    validation_metric: float


def networks_command(config: RaceConfig, console: Console) -> list[Path]:
    """Run what has not run yet; show and write what there is."""
    races = run_networks(config, console)
    document = Document(
        title="The race on networks",
        command=config.command,
        settings=settings(races[0]),
        tables=tables(races),
        picture=draw(races),
    )
    rows = curve_rows(races)
    curves = write_csv(rows, config.folder / CURVES)
    written = publish(document, curves, config.output, console)
    written += [race.store.path for race in races]
    if config.output is not None:
        written.append(write_csv(rows, config.output.with_suffix(".csv")))
    return written


def curve_rows(races: Sequence[NetworkRace]) -> list[CurveRow]:
    """Every evaluation of the runs that are shown."""
    return [
        CurveRow(
            trial.problem, trial.optimizer, trial.phase, trial.lr, trial.batch, trial.seed,
            int(row[0]), int(row[1]), round(row[2], 3), *(float(f"{value:.6g}") for value in row[3:]),
        )
        for race in races
        for racer in racers_named(race.config.optimizers)
        for phase in ("tune", "race")
        for trial in race.found(phase, racer)
        for row in trial.rows
    ]  # fmt: skip
