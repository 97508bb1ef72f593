"""`kronfac bench ordinary`: K-FAC as it comes beside AdamW with a tuned learning rate, in equal seconds.

`problems.py` has the ten problems, `run.py` one run, `trials.py` all of them, `score.py` the comparison,
`table.py`, `plot.py` and `page.py` what is shown of it.
"""

from pathlib import Path

import torch
from rich.console import Console

from kronfac.experiments.bench.ordinary.config import OrdinaryConfig
from kronfac.experiments.bench.ordinary.page import write_markdown, write_page
from kronfac.experiments.bench.ordinary.score import lines_of
from kronfac.experiments.bench.ordinary.table import show
from kronfac.experiments.bench.ordinary.trials import RESULT, run_trials

__all__ = ["OrdinaryConfig", "ordinary_command"]


def ordinary_command(config: OrdinaryConfig) -> list[Path]:
    """Run what has not run yet; show the table, write the page."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    trials = run_trials(config, console)
    lines = lines_of([problem.name for problem in config.chosen], trials, config.starts)
    show(lines, console)
    written = [config.folder / RESULT, write_page(config, lines, trials)]
    if config.output is not None:
        written += write_markdown(config.output, config, lines, trials)
    return written
