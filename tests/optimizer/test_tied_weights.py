"""Weights that are used both ways, V in one place and Vᵀ in another, get the sum of both uses' products.

Warnings are errors here: the comparison of the rebuilt gradient with autograd's is silent, so all uses are
seen.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.curvature import Block, DiagonalBlock, KroneckerSumBlock
from tests.conftest import normal, seeded
from tests.optimizer.runs import closure_of
from tests.optimizer.test_any_network import assert_dense_step

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 40, 14, 5, 24


class LanguageModel(nn.Module):
    """One block of attention between an embedding and a head that share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.query, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.3, generator=seeded())

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = (self.query(h) @ h.mT).masked_fill(later, -1e9)
        h = h + scores.softmax(dim=-1) @ self.value(h)
        h = h + self.down(torch.tanh(self.up(h)))
        return self.head(h).transpose(1, 2)  # (examples, vocabulary, places)


class Autoencoder(nn.Module):
    """The decoder is the transpose of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(30, 20)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.encoder(x)) @ self.encoder.weight


def tokens() -> tuple[Tensor, Tensor]:
    """Sequences in which the next token is a fixed function of the last one, most of the time."""
    generator = seeded(1)
    following = torch.randperm(VOCABULARY, generator=generator)
    columns = [torch.randint(VOCABULARY, (EXAMPLES,), generator=generator)]
    for _ in range(LENGTH):
        other = torch.randint(VOCABULARY, (EXAMPLES,), generator=generator)
        often = torch.rand(EXAMPLES, generator=generator) < 0.9
        columns.append(torch.where(often, following[columns[-1]], other))
    sequence = torch.stack(columns, dim=1)
    return sequence[:, :-1], sequence[:, 1:]


def language() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    return LanguageModel().double(), nn.CrossEntropyLoss(), *tokens()


def autoencoder() -> tuple[nn.Module, nn.Module, Tensor, Tensor]:
    x = (normal(60, 5) @ normal(5, 30, seed=1) > 0).double()
    return Autoencoder().double(), nn.BCEWithLogitsLoss(), x, x


PROBLEMS = {
    "language model": (language, "embedding.weight"),
    "autoencoder": (autoencoder, "encoder"),
}
each_problem = pytest.mark.parametrize(("problem", "name"), PROBLEMS.values(), ids=PROBLEMS)


def block_of(optimizer: KFAC, name: str) -> Block:
    return next(unit.block for unit in optimizer.network.units if unit.name == name)


@each_problem
@pytest.mark.parametrize("own", [True, False], ids=["KFAC.closure", "own closure"])
def test_the_quadratic_model_is_that_of_the_dense_fisher(problem, name, own):
    model, loss, x, y = problem()
    x, y = (
        t[:2, :2] if t.dtype == torch.int64 else t[:4] for t in (x, y)
    )  # 160 outputs at the most
    optimizer = assert_dense_step(model, loss, x, y, own)
    assert isinstance(block_of(optimizer, name), KroneckerSumBlock)


def trained(problem, name: str, block: Block | None = None) -> float:
    """The loss after twenty steps, with this block for the tied weight or with the one that it gets."""
    torch.manual_seed(0)
    model, loss, x, y = problem()
    optimizer = KFAC(model, loss)
    if block is not None:
        units = [
            replace(unit, block=block, chosen=True) if unit.name == name else unit
            for unit in optimizer.network.units
        ]
        optimizer.network = replace(optimizer.network, units=units)
    for _ in range(20):
        optimizer.step(closure_of(optimizer, loss, x, y))
    assert isinstance(block_of(optimizer, name), type(block or KroneckerSumBlock()))
    return float(loss(model(x), y).detach())


@each_problem
def test_it_trains_faster_than_with_a_diagonal_block(problem, name):
    """A diagonal block of per-example gradients, which sees all uses."""
    assert trained(problem, name) < trained(problem, name, DiagonalBlock())
