"""A run that is saved and continued equals the uninterrupted one to the bit, whatever the configuration."""

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.extend import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    EigenvalueCorrectedInverse,
    ExactTikhonov,
)
from tests.conftest import mlp, normal
from tests.optimizer.runs import same

INTERVAL, SAVED_AT, LAST = 6, 7, 13
"""Saved one step after a refresh, so that five steps are made with an inverse from the file."""
INVERSES: dict[str, Any] = {
    "block_diagonal": BlockDiagonalInverse(),
    "exact_tikhonov": BlockDiagonalInverse(tikhonov=ExactTikhonov()),
    "low_rank": BlockDiagonalInverse(low_rank=True),
    "block_tridiagonal": BlockTridiagonalInverse(),
    "smith": BlockTridiagonalInverse(solver="smith"),
    "ekfac": EigenvalueCorrectedInverse(),
    "ekfac_exact": EigenvalueCorrectedInverse(tikhonov=ExactTikhonov()),
}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def new_run(widths: list[int], inverse: str, dtype: str, **settings: Any) -> KFAC:
    settings = {"inverse": INVERSES[inverse], "inverse_interval": INTERVAL} | settings
    return KFAC(mlp(widths, dtype=DTYPES[dtype]), nn.MSELoss(), **settings)


def advance(optimizer: KFAC, steps: range) -> None:
    """Take these steps, each on a mini-batch of its own."""
    first, *_, last = (p for p in optimizer.model.parameters() if p.dim() == 2)
    for k in steps:
        x = normal(40, first.shape[1], seed=k, dtype=first.dtype)
        optimizer.step(optimizer.closure(x, x.sum(dim=1, keepdim=True).sin().expand(-1, len(last))))


def through_a_file(optimizer: KFAC) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(contents(optimizer), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def contents(optimizer: KFAC) -> dict[str, Any]:
    return {"model": dict(optimizer.model.state_dict()), "optimizer": optimizer.state_dict()}


@given(
    width=st.sampled_from([1, 2, 4, 7, 10, 16, 31, 32, 50, 64, 100, 127]),
    hidden=st.integers(1, 3),
    outputs=st.sampled_from([1, 1, 2, 3]),
    inverse=st.sampled_from(sorted(INVERSES)),
    dtype=st.sampled_from(sorted(DTYPES)),
    weight_decay=st.sampled_from([0.0, 1e-3]),
    lag=st.sampled_from([0, 0, 3]),
)
# Equal hidden widths and one output, of which most once differed in the last bits.
@example(4, 2, 1, "block_diagonal", "float32", 0.0, 0)
@example(10, 3, 1, "block_diagonal", "float64", 0.0, 0)
@example(32, 2, 1, "block_diagonal", "float32", 1e-3, 0)
@example(50, 3, 1, "block_diagonal", "float32", 0.0, 0)
@example(50, 3, 3, "block_diagonal", "float64", 0.0, 0)
@example(100, 2, 1, "block_diagonal", "float64", 0.0, 3)
def test_continued_from_a_file_it_equals_the_uninterrupted_run(
    width, hidden, outputs, inverse, dtype, weight_decay, lag
):
    def run() -> KFAC:
        widths = [10, *[width] * hidden, outputs]
        return new_run(widths, inverse, dtype, weight_decay=weight_decay, inverse_lag=lag)

    uninterrupted, continued = run(), run()
    advance(uninterrupted, range(SAVED_AT))
    saved = through_a_file(uninterrupted)
    advance(uninterrupted, range(SAVED_AT, LAST))
    continued.model.load_state_dict(saved["model"])
    continued.load_state_dict(saved["optimizer"])
    advance(continued, range(SAVED_AT, LAST))
    assert same(contents(continued), contents(uninterrupted))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inverse", INVERSES)
def test_a_loaded_state_is_laid_out_in_memory_as_the_one_that_was_saved(inverse, dtype):
    """On other machines other products round by alignment; so the layout itself is compared."""
    run = new_run([10, 10, 10, 10, 1], inverse, dtype)
    advance(run, range(SAVED_AT))
    loaded = new_run([10, 10, 10, 10, 1], inverse, dtype)
    loaded.load_state_dict(through_a_file(run)["optimizer"])
    before, after = list(tensors(run.state_dict())), list(tensors(loaded.state_dict()))
    assert len(before) == len(after) > 0
    assert list(map(layout, before)) == list(map(layout, after))


def layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.data_ptr() % 64


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors(item)
