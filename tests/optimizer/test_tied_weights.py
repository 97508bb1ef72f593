"""Weights that are used both ways, V in one place and Vᵀ in another, get the sum of both uses' products.

Warnings are errors here: the comparison of the rebuilt gradient with autograd's is silent, so all uses are
seen.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from kronfac import KFAC
from kronfac.curvature import DiagonalBlock, KroneckerSumBlock, KroneckerSumMoments
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


def unit_of(optimizer: KFAC, name: str):
    return next(unit for unit in optimizer.network.units if unit.name == name)


@each_problem
@pytest.mark.parametrize("own", [True, False], ids=["KFAC.closure", "own closure"])
def test_the_quadratic_model_is_that_of_the_dense_fisher(problem, name, own):
    model, loss, x, y = problem()
    x, y = (
        t[:2, :2] if t.dtype == torch.int64 else t[:4] for t in (x, y)
    )  # 160 outputs at the most
    optimizer = assert_dense_step(model, loss, x, y, own)
    assert isinstance(unit_of(optimizer, name).block, KroneckerSumBlock)


@each_problem
def test_the_factors_are_those_of_both_uses(problem, name):
    """A of the direct and G of the transposed uses, which no random numbers enter."""
    model, loss, x, y = problem()
    optimizer = KFAC(model, loss)
    inputs: dict[str, Tensor] = {}
    layer = model.head if name == "embedding.weight" else model.encoder
    handle = layer.register_forward_pre_hook(lambda _, args: inputs.update(direct=args[0].detach()))
    model(x)
    handle.remove()
    optimizer.step(optimizer.closure(x, y))
    number = optimizer.network.units.index(unit_of(optimizer, name))
    moments = optimizer._state.curvature.blocks[number]
    assert isinstance(moments, KroneckerSumMoments)
    a = inputs["direct"].flatten(0, -2)
    if name == "encoder":
        a = torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], dim=1)
    assert_close(moments.direct.A, a.mT @ a / len(a), rtol=1e-8, atol=1e-10)
    if name == "embedding.weight":
        counts = torch.bincount(x.flatten(), minlength=VOCABULARY).double() / x.numel()
        assert_close(moments.transposed.G, counts, rtol=1e-8, atol=1e-10)


def trained(problem, name: str, steps: int, diagonal: bool = False) -> float:
    """The loss after some steps, of the model with a diagonal block for the tied weight if wanted."""
    torch.manual_seed(0)
    model, loss, x, y = problem()
    optimizer = KFAC(model, loss)
    closure = closure_of(optimizer, loss, x, y)
    if diagonal:
        units = [
            replace(unit, block=DiagonalBlock(), chosen=True) if unit.name == name else unit
            for unit in optimizer.network.units
        ]
        optimizer.network = replace(optimizer.network, units=units)
    for _ in range(steps):
        optimizer.step(closure)
    expected = DiagonalBlock if diagonal else KroneckerSumBlock
    assert isinstance(unit_of(optimizer, name).block, expected)
    return float(loss(model(x), y).detach())


@each_problem
def test_it_trains_faster_than_with_a_diagonal_block(problem, name):
    """A diagonal block of per-example gradients, which sees all uses."""
    both, diagonal = (trained(problem, name, 20, diagonal) for diagonal in (False, True))
    assert both < diagonal


@each_problem
def test_a_run_continues_from_its_state(problem, name):
    model, loss, x, y = problem()
    optimizer = KFAC(model, loss)
    for _ in range(3):
        optimizer.step(optimizer.closure(x, y))
    again = copy.deepcopy(model)
    resumed = KFAC(again, loss)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(6):
        expected, found = (float(o.step(o.closure(x, y))) for o in (optimizer, resumed))
        assert found == expected
    assert isinstance(unit_of(resumed, name).block, KroneckerSumBlock)
