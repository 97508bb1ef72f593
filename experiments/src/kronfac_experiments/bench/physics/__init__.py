"""`kronfac bench physics`: differential equations by K-FAC, Adam, SOAP and L-BFGS, in equal seconds.

`equations.py` has the equations, `methods.py` who solves them, `runs.py` all runs, `page.py` what is
shown of them.
"""

from pathlib import Path

import torch
from rich.console import Console

from kronfac_experiments.bench.physics.config import PhysicsConfig
from kronfac_experiments.bench.physics.page import draw, tables
from kronfac_experiments.bench.physics.runs import run_trials
from kronfac_experiments.options import command_line
from kronfac_experiments.pages.document import Document
from kronfac_experiments.pages.publish import publish

__all__ = ["PhysicsConfig", "physics_command"]


def physics_command(config: PhysicsConfig) -> list[Path]:
    """Run what has not run yet; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    trials = run_trials(config, console)
    document = Document(
        title="Differential equations: relative L² error against seconds",
        command=command_line("bench physics", config, leave_out=("run_dir",)),
        settings=config.described,
        tables=tables(config, trials),
        picture=draw(config, trials),
    )
    return publish(document, config.folder / "physics.json", config.output, console)
