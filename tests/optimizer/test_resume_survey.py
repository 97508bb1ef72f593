"""A run that is saved and continued equals the uninterrupted one to the bit, whatever the configuration."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from kronfac import KFAC, Intervals
from kronfac.extend import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    EigenvalueCorrectedInverse,
    ExactTikhonov,
)
from tests.conftest import mlp, normal
from tests.optimizer.resume import contents, through_a_file
from tests.optimizer.runs import same

INTERVAL, SAVED_AT, LAST = 6, 7, 13
"""Saved one step after a refresh, so that five steps are made with an inverse from the file."""
INVERSES = [
    BlockDiagonalInverse(),
    BlockDiagonalInverse(tikhonov=ExactTikhonov()),
    BlockDiagonalInverse(low_rank=True),
    BlockTridiagonalInverse(),
    EigenvalueCorrectedInverse(),
    EigenvalueCorrectedInverse(tikhonov=ExactTikhonov()),
]


def advance(optimizer: KFAC, steps: range) -> None:
    """Take these steps, each on a mini-batch of its own."""
    first, *_, last = (p for p in optimizer.model.parameters() if p.dim() == 2)
    for k in steps:
        x = normal(40, first.shape[1], seed=k, dtype=first.dtype)
        optimizer.step(optimizer.closure(x, x.sum(dim=1, keepdim=True).sin().expand(-1, len(last))))


@given(
    width=st.sampled_from([1, 2, 4, 7, 10, 16, 31, 32, 50, 64, 100, 127]),
    hidden=st.integers(1, 3),
    outputs=st.sampled_from([1, 1, 2, 3]),
    inverse=st.sampled_from(INVERSES),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    weight_decay=st.sampled_from([0.0, 1e-3]),
    lag=st.sampled_from([0, 0, 3]),
)
# Equal hidden widths and one output, of which most once differed in the last bits.
@example(4, 2, 1, INVERSES[0], torch.float32, 0.0, 0)
@example(10, 3, 1, INVERSES[0], torch.float64, 0.0, 0)
@example(32, 2, 1, INVERSES[0], torch.float32, 1e-3, 0)
@example(50, 3, 1, INVERSES[0], torch.float32, 0.0, 0)
@example(50, 3, 3, INVERSES[0], torch.float64, 0.0, 0)
@example(100, 2, 1, INVERSES[0], torch.float64, 0.0, 3)
def test_continued_from_a_file_it_equals_the_uninterrupted_run(
    width, hidden, outputs, inverse, dtype, weight_decay, lag
):
    def run() -> KFAC:
        return KFAC(
            mlp([10, *[width] * hidden, outputs], dtype=dtype),
            nn.MSELoss(),
            inverse=inverse,
            weight_decay=weight_decay,
            intervals=Intervals(inverse_interval=INTERVAL, inverse_lag=lag),
        )

    uninterrupted, continued = run(), run()
    advance(uninterrupted, range(SAVED_AT))
    saved = through_a_file(contents(uninterrupted))
    advance(uninterrupted, range(SAVED_AT, LAST))
    continued.model.load_state_dict(saved["model"])
    continued.load_state_dict(saved["optimizer"])
    advance(continued, range(SAVED_AT, LAST))
    assert same(contents(continued), contents(uninterrupted))
