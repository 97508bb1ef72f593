"""A run that is saved and continued equals the uninterrupted one to the bit, for every kind of block."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC, Blocks, Intervals
from tests.conftest import seeded
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


@pytest.mark.parametrize("inverse", ["block_diagonal", "ekfac"])
@pytest.mark.parametrize("case", CASES)
def test_continued_from_a_file_or_a_copy_it_equals_the_uninterrupted_run(case, inverse):
    whole = new_run(case, inverse)
    advance(whole, case, range(SAVED_AT))
    saved = through_a_file(contents(whole))
    blocks = saved["optimizer"]["kfac"]["curvature"]["blocks"]
    assert f"kronfac.{CASES[case][3]}" in {block["class"] for block in blocks}
    copied = copy.deepcopy(whole)
    resumed = new_run(case, inverse)
    resumed.model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for optimizer in (whole, resumed, copied):
        advance(optimizer, case, range(SAVED_AT, LAST))
    assert same(contents(whole), contents(resumed))
    assert same(contents(whole), contents(copied))
