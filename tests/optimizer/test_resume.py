"""A run that is saved and continued equals the uninterrupted one to the bit: every block, many widths."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from kronfac import KFAC, Blocks, Intervals
from kronfac.extend import (
    BlockDiagonalInverse,
    BlockTridiagonalInverse,
    EigenvalueCorrectedInverse,
    ExactTikhonov,
)
from tests.conftest import mlp, normal, seeded
from tests.optimizer.resume import contents, through_a_file
from tests.optimizer.runs import closure_of, same

SAVED_AT, LAST, CLASSES = 4, 9, 4
"""Saved between two refreshes: with `inverse_interval=3` the next one is three steps later."""


class Language(nn.Module):
    """Embedding, a scale of its own and a head, tied to the embedding or not."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(tokens) * self.scale)).mean(dim=1))


def convolutions(groups: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(4, 6, 3),
        nn.GroupNorm(2, 6),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=groups),
        nn.Flatten(),
        nn.LayerNorm(54),
        nn.Linear(54, CLASSES),
    )


class Wide(nn.Module):
    """A grouped convolution whose groups have too many columns for dense pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 4, 6, groups=2)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.grouped(x)).flatten(1))


class Other(nn.Module):
    """Layers and parameters of other kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(5, 4, batch_first=True)
        self.up = nn.ConvTranspose1d(4, 3, 2, stride=2)
        self.mix = nn.Parameter(torch.randn(3, 3) / 2)
        self.head = nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.recurrent(x)[0].mT).mean(dim=-1)
        return self.head(torch.tanh(h @ self.mix) + h * self.mix.diagonal())


def images(k: int) -> Tensor:
    return torch.randn(12, 4, 7, 7, generator=seeded(k))


def sequences(k: int) -> Tensor:
    return torch.randn(12, 6, 5, generator=seeded(k))


def tokens(k: int) -> Tensor:
    return torch.randint(CLASSES, (12, 5), generator=seeded(k))


Case = tuple[Callable[[], nn.Module], Callable[[int], Tensor], Blocks | None, str]
CASES: dict[str, Case] = {
    "dense": (lambda: convolutions(2), images, None, "DenseMoments"),
    "convolution": (lambda: convolutions(1), images, Blocks(dense_limit=8), "KroneckerMoments"),
    "grouped": (Wide, images, Blocks(dense_limit=8), "GroupedKroneckerMoments"),
    "pieces": (lambda: convolutions(6), images, Blocks(dense_limit=12), "DenseMoments"),
    "embedding": (lambda: Language(False), tokens, Blocks(dense_limit=4), "KroneckerMoments"),
    "tied": (lambda: Language(True), tokens, Blocks(dense_limit=4), "KroneckerSumMoments"),
    "wide": (lambda: Language(False), tokens, Blocks("reduce", 4, 5), "KroneckerMoments"),
    "diagonal": (Other, sequences, Blocks(dense_limit=0), "DiagonalMoments"),
}


def new_run(case: str, inverse: str) -> KFAC:
    make, _, blocks, _ = CASES[case]
    torch.manual_seed(0)
    return KFAC(
        make(),
        nn.CrossEntropyLoss(),
        inverse=inverse,
        blocks=blocks,
        intervals=Intervals(inverse_interval=3),
    )


def advance(optimizer: KFAC, case: str, steps: range) -> None:
    loss = optimizer.objective.module
    for k in steps:
        optimizer.step(closure_of(optimizer, loss, CASES[case][1](k), torch.arange(12) % CLASSES))


def assert_continues(
    new: Callable[[], KFAC], advance: Callable[[KFAC, range], None], saved_at: int, last: int
) -> dict[str, Any]:
    """From a file, and as a copy, a run makes the steps that it makes without interruption.

    Returns what was saved.
    """
    whole, resumed = new(), new()
    advance(whole, range(saved_at))
    saved, copied = through_a_file(contents(whole)), copy.deepcopy(whole)
    resumed.model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for optimizer in (whole, resumed, copied):
        advance(optimizer, range(saved_at, last))
    assert same(contents(whole), contents(resumed))
    assert same(contents(whole), contents(copied))
    return saved


@pytest.mark.parametrize("inverse", ["block_diagonal", "ekfac"])
@pytest.mark.parametrize("case", CASES)
def test_with_every_kind_of_block(case, inverse):
    saved = assert_continues(
        lambda: new_run(case, inverse),
        lambda optimizer, steps: advance(optimizer, case, steps),
        SAVED_AT,
        LAST,
    )
    kinds = {block["class"] for block in saved["optimizer"]["kfac"]["curvature"]["blocks"]}
    assert f"kronfac.{CASES[case][3]}" in kinds


INVERSES = [
    BlockDiagonalInverse(),
    BlockDiagonalInverse(tikhonov=ExactTikhonov()),
    BlockDiagonalInverse(low_rank=True),
    BlockTridiagonalInverse(),
    EigenvalueCorrectedInverse(),
    EigenvalueCorrectedInverse(tikhonov=ExactTikhonov()),
]


def advance_perceptron(optimizer: KFAC, steps: range) -> None:
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
def test_with_perceptrons_of_many_widths(width, hidden, outputs, inverse, dtype, weight_decay, lag):
    """Saved one step after a refresh, so that five steps are made with an inverse from the file."""

    def new() -> KFAC:
        return KFAC(
            mlp([10, *[width] * hidden, outputs], dtype=dtype),
            nn.MSELoss(),
            inverse=inverse,
            weight_decay=weight_decay,
            intervals=Intervals(inverse_interval=6, inverse_lag=lag),
        )

    assert_continues(new, advance_perceptron, saved_at=7, last=13)
