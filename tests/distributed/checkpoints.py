"""Runs that are saved by torch.distributed.checkpoint in one world and go on in another."""

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from kronfac import KFAC
from kronfac.distributed import WholeState
from tests.distributed.cases import FRACTIONS, LAGGED, flat, perceptron, portion
from tests.distributed.ranks import Case

SAVED_AT, STEPS, EXAMPLES = 7, 15, 24
SAVING_RANKS = 2
FOLDER = "KRONFAC_TEST_CHECKPOINT"
"""The environment variable that names the folder of the checkpoints."""


def train(
    rank: int, size: int, *, name: str, ddp: bool = False, **settings: Any
) -> Mapping[str, Any]:
    """In a world of two, save on the way to the end; in others, begin with what was saved there."""
    model: nn.Module = perceptron().double()
    inner = model
    saving = size == SAVING_RANKS
    if not saving:  # from other parameters
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
    if ddp:
        model = DistributedDataParallel(model)
    optimizer = KFAC(model, nn.MSELoss(), **settings)
    folder = Path(os.environ[FOLDER]) / name

    def state() -> dict[str, Any]:
        return {"model": inner.state_dict(), "optimizer": WholeState(optimizer)}

    if not saving:
        dcp.load(state(), checkpoint_id=folder)
    for k in range(0 if saving else SAVED_AT, STEPS):
        if saving and k == SAVED_AT:
            dcp.save(state(), checkpoint_id=folder)
        optimizer.step(optimizer.closure(*portion(k, EXAMPLES, rank, size)))
    return {"parameters": flat(inner)}


CASES: dict[str, Case] = {
    f"saved-{name}": partial(train, name=name, **settings)
    for name, settings in {
        "plain": dict(FRACTIONS),
        "tridiagonal": {"inverse": "block_tridiagonal", **FRACTIONS},
        "ekfac": {"inverse": "ekfac", **FRACTIONS},
        "ddp": {"ddp": True, **FRACTIONS},
        "lag": {"intervals": LAGGED},
    }.items()
}
