"""Runs that are saved between two refreshes and continued in another process.

`python -m tests.optimizer.resume DIRECTORY` continues every run that it finds a file of.
"""

import io
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import (
    KFAC,
    AdaptiveDamping,
    AdaptiveGamma,
    GammaSearch,
    Intervals,
    LevenbergMarquardtRule,
)
from kronfac.extend import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    EigenvalueCorrectedInverse,
    ExactTikhonov,
    SampledFisher,
)
from tests.conftest import mlp, normal

SAVED_AT = 6
"""Two steps after a refresh and two before the next: the inverse in the file is a stale one."""
LAST = 13
PERIODS = {
    "damping": LevenbergMarquardtRule(lambda_=0.5, interval=3),
    "gamma": GammaSearch(interval=4),
    "intervals": Intervals(inverse_interval=4),
}
LAGGED = Intervals(inverse_interval=4, inverse_lag=3)

CASES: dict[str, dict[str, Any]] = {
    "block_diagonal": {"inverse": BlockDiagonalInverse()},
    "exact_tikhonov": {"inverse": BlockDiagonalInverse(tikhonov=ExactTikhonov())},
    "low_rank": {"inverse": BlockDiagonalInverse(low_rank=True), "weight_decay": 0.1},
    "decomposition": {"inverse": BlockTridiagonalInverse(), "weight_decay": 0.01},
    "out_of_order": {"inverse": BlockTridiagonalInverse()},
    "ekfac": {"inverse": EigenvalueCorrectedInverse(), "weight_decay": 0.01},
    "three_samples": {"fisher": SampledFisher(samples=3, seed=5)},
    "chunks": {"intervals": Intervals(0.6, 0.4, inverse_interval=4)},
    # Saved between the start of a refresh and its use, after one that was used.
    "background": {
        "inverse": BlockDiagonalInverse(),
        "intervals": LAGGED,
        "weight_decay": 0.01,
    },
    "background_ekfac": {
        "inverse": EigenvalueCorrectedInverse(),
        "intervals": LAGGED,
    },
    "background_tridiagonal": {
        "inverse": BlockTridiagonalInverse(),
        "intervals": LAGGED,
    },
    # The last step is saved before it was judged, with what it takes to take it back.
    "adaptive": {
        "damping": AdaptiveDamping(),
        "gamma": AdaptiveGamma(),
        "intervals": Intervals(),
        "weight_decay": 0.01,
    },
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


class Backwards(nn.Module):
    """A chain whose layers are defined last first."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.middle, self.first = reversed(mlp([8, 12, 12, 3], seed=3)[::2])

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def new_run(case: str, dtype: str) -> KFAC:
    model = Backwards() if case == "out_of_order" else mlp([8, 12, 12, 3], seed=3)
    return KFAC(model.to(DTYPES[dtype]), nn.MSELoss(), **PERIODS | CASES[case])


def advance(optimizer: KFAC, case: str, last: int) -> None:
    """Up to and with step `last`, each on its own mini-batch."""
    dtype = next(optimizer.model.parameters()).dtype
    for k in range(optimizer.state_dict()["kfac"]["iteration"] + 1, last + 1):
        x, y = normal(5, 8, seed=k, dtype=dtype), normal(5, 3, seed=100 + k, dtype=dtype)
        optimizer.step(optimizer.closure(x, y, chunk=2 if case == "chunks" else None))


def contents(optimizer: KFAC) -> dict[str, Any]:
    """What a training script would save."""
    return {"model": optimizer.model.state_dict(), "optimizer": optimizer.state_dict()}


def through_a_file(value: Any) -> Any:
    """What a training script would load again."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume(directory: Path) -> None:
    torch.set_num_threads(1)  # as in conftest.py
    for path in sorted(directory.glob("*.saved")):
        case, dtype = path.stem.split("-")
        optimizer = new_run(case, dtype)
        saved = torch.load(path, weights_only=True)
        optimizer.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        advance(optimizer, case, LAST)
        torch.save(contents(optimizer), path.with_suffix(".continued"))


if __name__ == "__main__":
    resume(Path(sys.argv[1]))
