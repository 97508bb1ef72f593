"""`kronfac bench race`: seconds, iterations and cases to fixed training errors, K-FAC and its peers.

`contests.py` says on what, `peers.py` who, with which grids; `trials.py` makes one run, `running.py`
all of them, `standings.py` compares; `table.py` and `page.py` show it. `networks/` has the race on
networks that are no chains of linear layers, in equal seconds.
"""

from pathlib import Path

from rich.console import Console

from kronfac_experiments.bench.race import page, table
from kronfac_experiments.bench.race.config import RaceConfig
from kronfac_experiments.bench.race.networks.command import networks_command
from kronfac_experiments.bench.race.running import RESULT, run_race

__all__ = ["RaceConfig", "race_command"]


def race_command(config: RaceConfig) -> list[Path]:
    """Run what has not run yet; show the table, write it."""
    console = Console(highlight=False, soft_wrap=True)
    if config.on_networks:
        return networks_command(config, console)
    race = run_race(config, console)
    document = table.document(race)
    document.show(console)
    written = [config.folder / RESULT, page.write(race)]
    return written if config.output is None else [*written, *document.write_markdown(config.output)]
