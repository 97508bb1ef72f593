"""`kronfac ablate`: K-FAC with one thing changed at a time, a row each, from the same starts.

`rows.py` says what is changed, `trials.py` runs it, `table.py` makes the table and the picture.
"""

from pathlib import Path

import torch
from rich.console import Console

from kronfac_experiments.ablation.config import AblateConfig
from kronfac_experiments.ablation.rows import rows_named
from kronfac_experiments.ablation.table import document, lines_of
from kronfac_experiments.ablation.trials import RESULT, run_trials
from kronfac_experiments.machine import usable_device
from kronfac_experiments.pages.csv_files import write_csv
from kronfac_experiments.pages.publish import publish
from kronfac_experiments.task import load_task

__all__ = ["AblateConfig", "ablate_command"]


def ablate_command(config: AblateConfig) -> list[Path]:
    """Run what has not run yet; show the table, write it, draw it."""
    console = Console(highlight=False, soft_wrap=True)
    rows = rows_named(config.rows)
    torch.set_num_threads(config.threads)
    device = usable_device(config.device)
    task = load_task(config.source).to(device, torch.float32)
    command, config = config.command, config.fitted(len(task.train))
    trials = run_trials(config, task, rows, console)
    lines = lines_of(rows, trials, config.sizes.iterations)
    numbers = write_csv(lines, config.folder / "ablate.csv")
    pages = document(config, command, lines)
    return [numbers, *publish(pages, config.folder / RESULT, config.folder / "ablate.md", console)]
