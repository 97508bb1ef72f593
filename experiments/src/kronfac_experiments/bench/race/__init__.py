"""`kronfac bench race`: seconds, iterations and cases to fixed training errors, K-FAC and its peers.

`contests.py` says on what, `peers.py` who, with which grids; `trials.py` makes one run, `running.py` all of
them, `standings.py` compares; `table.py` and `page.py` show it.
"""

from pathlib import Path

from rich.console import Console

from kronfac_experiments.bench.race import page, table
from kronfac_experiments.bench.race.config import RaceConfig
from kronfac_experiments.bench.race.running import RESULT, run_race

__all__ = ["RaceConfig", "race_command"]


def race_command(config: RaceConfig) -> list[Path]:
    """Run what has not run yet; show the table, write it."""
    console = Console(highlight=False, soft_wrap=True)
    race = run_race(config, console)
    table.show(race, console)
    written = [config.folder / RESULT, page.write(race)]
    if config.output is not None:
        config.output.parent.mkdir(parents=True, exist_ok=True)
        config.output.write_text(table.markdown(race), encoding="utf-8")
        written.append(config.output)
    return written
