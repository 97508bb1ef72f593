"""A run with fixed rules whose state is kept in a file, for later versions to read.

`python -m tests.optimizer.old_states` writes the files of this version, which is done once for each.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from kronfac import KFAC, FixedDamping, FixedGamma, QuadraticModel
from tests.conftest import mlp, normal

FOLDER = Path(__file__).parent / "data"
INVERSES = ("block_diagonal", "block_tridiagonal")
SAVED_AT, LAST = 7, 12


def new_run(inverse: str) -> KFAC:
    """Nothing is decided by a rule of kronfac's own, and nothing drawn decides what is seen."""
    return KFAC(
        mlp([4, 5, 3], seed=3),
        nn.MSELoss(),
        inverse=inverse,
        weight_decay=0.01,
        damping=FixedDamping(0.5),
        gamma=FixedGamma(0.7),
        step_size=QuadraticModel(momentum=True),
        statistics_fraction=1.0,
        fisher_fraction=1.0,
        inverse_interval=5,
    )


def advance(optimizer: KFAC, steps: range) -> None:
    for k in steps:
        optimizer.step(optimizer.closure(normal(20, 4, seed=k), normal(20, 3, seed=100 + k)))


def contents(optimizer: KFAC) -> dict[str, Any]:
    return {"model": optimizer.model.state_dict(), "optimizer": optimizer.state_dict()}


def write(inverse: str) -> None:
    optimizer = new_run(inverse)
    advance(optimizer, range(SAVED_AT))
    saved = contents(optimizer)
    version = saved["optimizer"]["kfac"]["version"]
    saved["model"] = {name: value.clone() for name, value in saved["model"].items()}
    advance(optimizer, range(SAVED_AT, LAST))
    saved["last"] = dict(optimizer.model.state_dict())
    torch.save(saved, FOLDER / f"state_version_{version}_{inverse}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for inverse in INVERSES:
        write(inverse)
