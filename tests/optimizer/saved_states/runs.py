"""Runs whose states are kept as files, so that a later version is shown to continue them.

    python -m tests.optimizer.saved_states.runs v6 [NAME …]      record the runs of a version

A file holds the model and the optimizer as a training script saves them, and what the version that wrote it
found in the next five steps: the losses and the parameters after them. It is written once, by the version
that its name says.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kronfac
from kronfac import KFAC, BlockDiagonalInverse
from tests.conftest import mlp, normal

FOLDER = Path(__file__).parent
CONTINUED = 5


@dataclass(frozen=True)
class Run:
    """A small network, saved after `steps` steps."""

    steps: int
    settings: dict[str, Any] = field(default_factory=dict)
    loss: Callable[[], nn.Module] = nn.MSELoss
    noise: float = 0.1
    examples: int = 30


def _paper(**changes: Any) -> dict[str, Any]:
    """The paper's settings with shorter intervals, so that a search for γ lies between two steps."""
    return (
        kronfac.presets.paper()
        | {
            "damping": kronfac.LevenbergMarquardt(lambda_=0.5, interval=3),
            "gamma": kronfac.GammaSearch(interval=6),
            "inverse_interval": 3,
        }
        | changes
    )


RUNS = {
    "before_its_first_step": Run(0),
    # In the first 20 iterations every step is validated by the next mini-batch: θ is kept for it.
    "default_block_diagonal": Run(9),
    "default_block_tridiagonal": Run(
        9,
        {"inverse": "block_tridiagonal", "weight_decay": 1e-2},
        lambda: nn.MSELoss(reduction="sum"),
    ),
    # The next mini-batch validates nothing, unless the loss jumps.
    "between_validations": Run(26, {"weight_decay": 1e-2}),
    "averaged_iterate": Run(
        107, {"damping": kronfac.AdaptiveDamping(settling=200)}, noise=1.0, examples=16
    ),
    "pending_refresh": Run(37, {"inverse_lag": 4, "inverse_interval": 9, "weight_decay": 1e-2}),
    "pending_refresh_tridiagonal": Run(
        7, _paper(inverse_lag=2, inverse="block_tridiagonal", inverse_interval=6)
    ),
    "paper_block_diagonal": Run(8, _paper(weight_decay=1e-2)),
    "paper_block_tridiagonal": Run(8, _paper(inverse="block_tridiagonal")),
    "paper_as_it_is": Run(4, kronfac.presets.paper()),
    "low_rank": Run(
        8, _paper(inverse=BlockDiagonalInverse(low_rank=True), weight_decay=1e-2), examples=3
    ),
    "fixed": Run(
        4,
        {
            "damping": kronfac.FixedDamping(0.3),
            "gamma": kronfac.TiedGamma(),
            "step_size": kronfac.RawStep(0.5),
        },
    ),
}


def optimizer_of(name: str) -> KFAC:
    run = RUNS[name]
    return KFAC(mlp([3, 5, 5, 2], seed=3), run.loss(), **run.settings)


def advance(optimizer: KFAC, name: str, first: int, last: int) -> list[float]:
    """Losses of the steps from `first` to `last`, each on its own mini-batch."""
    run, losses = RUNS[name], []
    for k in range(first, last + 1):
        x = normal(run.examples, 3, seed=2 * k)
        y = x[:, :2].sin() + run.noise * normal(run.examples, 2, seed=2 * k + 1)
        losses.append(float(optimizer.step(optimizer.closure(x, y))))
    return losses


def parameters(optimizer: KFAC) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in optimizer.model.named_parameters()}


def record(name: str) -> dict[str, Any]:
    optimizer, run = optimizer_of(name), RUNS[name]
    advance(optimizer, name, 1, run.steps)
    saved = {"model": parameters(optimizer), "optimizer": optimizer.state_dict()}
    losses = advance(optimizer, name, run.steps + 1, run.steps + CONTINUED)
    return saved | {"losses": losses, "parameters": parameters(optimizer)}


def main(version: str, *names: str) -> None:
    torch.set_num_threads(1)  # as in conftest.py
    for name in names or RUNS:
        torch.save(record(name), FOLDER / f"{version}_{name}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
