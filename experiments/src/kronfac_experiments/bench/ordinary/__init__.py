"""`kronfac bench ordinary`: K-FAC as it comes beside AdamW with a tuned learning rate, in equal seconds.

`problems.py` has the ten problems, `run.py` one run, `trials.py` all of them, `score.py` the comparison,
`tables.py` and `picture.py` what is shown of it.
"""

from pathlib import Path

import torch
from rich.console import Console

from kronfac_experiments.bench.ordinary.config import OrdinaryConfig
from kronfac_experiments.bench.ordinary.picture import draw
from kronfac_experiments.bench.ordinary.score import lines_of
from kronfac_experiments.bench.ordinary.tables import tables
from kronfac_experiments.bench.ordinary.trials import RESULT, run_trials
from kronfac_experiments.options import command_line
from kronfac_experiments.pages.document import Document
from kronfac_experiments.pages.publish import publish

__all__ = ["OrdinaryConfig", "ordinary_command"]


def ordinary_command(config: OrdinaryConfig) -> list[Path]:
    """Run what has not run yet; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    trials = run_trials(config, console)
    lines = lines_of([problem.name for problem in config.chosen], trials, config.starts)
    document = Document(
        title="K-FAC as it comes and AdamW tuned, on ordinary problems in equal seconds",
        command=command_line("bench ordinary", config),
        settings=config.described,
        tables=tables(lines, trials),
        picture=draw(lines, trials, config.duration),
    )
    return publish(document, config.folder / RESULT, config.output, console)
