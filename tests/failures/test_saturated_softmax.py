"""λ₀ where predictions are confident and wrong: the Fisher vanishes there, and the gradient does not."""

import math

import pytest
import torch
from torch import nn

from kronfac import KFAC, AdaptiveDamping
from kronfac.extend import LambdaSearch
from kronfac_experiments.data.shakespeare import PACKED, shakespeare
from tests.conftest import normal, seeded
from tests.trajectories.runs import DATA

ETA = 1e-3
SYMBOLS, LENGTH, SEQUENCES = 65, 32, 64


class Text(nn.Module):
    """A transformer whose head is its embedding, with the N(0, 1) weights that nn.Embedding starts with."""

    def __init__(self, width: int = 48, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, SYMBOLS, bias=False)
        self.head.weight = self.embed.weight
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask)

    def forward(self, x):
        outputs = self.head(self.body(self.embed(x), mask=self.mask, is_causal=True))
        return outputs.transpose(1, 2)  # (sequences, symbols, characters)


def least_lambda(W, x, y, eta):
    """‖g‖²/2h − gᵀ(F + ηI)g/‖g‖² of a softmax regression, from the definitions."""
    p = torch.softmax(x @ W.T, dim=1)
    residuals = (p - nn.functional.one_hot(y, len(W))) / len(x)
    g = residuals.T @ x + eta * W
    h = float(-p[range(len(y)), y].log().mean() + eta / 2 * W.square().sum())
    Jg = x @ g.T
    F_R = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    curvature = float(torch.einsum("ni,nij,nj->", Jg, F_R, Jg)) / len(x)
    squares = float(g.square().sum())
    return squares / (2 * h) - curvature / squares - eta


@pytest.mark.parametrize("eta", [0.0, ETA])
@pytest.mark.parametrize("start", [1e-12, 1e3])
def test_lambda_is_not_below_the_floor_by_the_gradient(eta, start):
    model, x = nn.Linear(6, 5, bias=False).double(), normal(80, 6)
    with torch.no_grad():
        model.weight.copy_(5 * normal(5, 6, seed=2))
        y = model(x).argmin(dim=1)
    floor = least_lambda(model.weight.detach().clone(), x, y, eta)
    assert floor > 0.01
    damping = AdaptiveDamping(lambda_=start, search=None)
    optimizer = KFAC(model, nn.CrossEntropyLoss(), weight_decay=eta, damping=damping)
    optimizer.step(optimizer.closure(x, y))
    assert optimizer.report.lambda_ == pytest.approx(max(start, floor), rel=1e-8)
    rounding = 1 - 1e-12  # the floor here and the optimizer's are sums in another order
    assert optimizer.report.gamma >= math.sqrt(floor + eta) * rounding


def test_without_saturation_there_is_no_floor():
    x, y = normal(80, 6), torch.randint(5, (80,), generator=seeded(1))
    model = nn.Linear(6, 5, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(0.1 * normal(5, 6, seed=2))
    damping = AdaptiveDamping(lambda_=1e-12, search=None)
    optimizer = KFAC(model, nn.CrossEntropyLoss(), damping=damping)
    optimizer.step(optimizer.closure(x, y))
    assert optimizer.report.lambda_ == 1e-12


def test_the_search_finds_a_lambda_for_a_saturated_softmax():
    """Without the floor λ₀ was 7e-9, and the loss 4.9 after these steps."""
    torch.manual_seed(0)
    model = Text(width=32, layers=1)
    optimizer = KFAC(model, nn.CrossEntropyLoss())
    first = None
    for seed in range(8):
        x = torch.randint(SYMBOLS, (16, LENGTH), generator=seeded(seed))
        loss = float(optimizer.step(optimizer.closure(x, (x + 1) % SYMBOLS)))
        first = first or optimizer.report
    assert first.loss > 30
    assert first.lambda_ > 0.1
    assert first.gamma > 0.1
    assert loss < 0.5


@pytest.fixture
def text(monkeypatch):
    """Tiny Shakespeare in windows of 32 characters."""
    if not (DATA / PACKED.path).is_file():
        pytest.skip("needs real data: set KRONFAC_DATA to a folder with it")
    monkeypatch.setenv("KRONFAC_DATA", str(DATA))
    return shakespeare(LENGTH)


def train(text, steps, seed, make):
    """The loss on held-out text, and λ after every step of K-FAC."""
    torch.manual_seed(seed)
    model, loss = Text(), nn.CrossEntropyLoss()
    optimizer, generator, lambdas = make(model, loss), seeded(seed), []
    for _ in range(steps):
        chosen = torch.randint(len(text.train.inputs), (SEQUENCES,), generator=generator)
        x, y = text.train.inputs[chosen], text.train.targets[chosen]
        if isinstance(optimizer, KFAC):
            optimizer.step(optimizer.closure(x, y))
            lambdas.append(optimizer.report.lambda_)
        else:
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    with torch.no_grad():
        x, y = (part[:512] for part in text.validation)
        return float(loss(model(x), y)), lambdas


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_transformer_with_normal_embeddings_learns_faster_than_by_adamw(text, seed):
    """λ₀ was 1e-13 and 1e-10 here, and K-FAC's loss after 40 steps above that of AdamW after 80."""
    by_adamw, _ = train(
        text, 80, seed, lambda model, _: torch.optim.AdamW(model.parameters(), 3e-3)
    )
    by_kfac, lambdas = train(text, 40, seed, KFAC)
    assert by_kfac < by_adamw
    for factor in (1e-6, 1e6):
        for search in (LambdaSearch(), None):
            damping = AdaptiveDamping(lambda_=factor * lambdas[0], search=search)
            _, wrong = train(text, 20, seed, lambda *made, rule=damping: KFAC(*made, damping=rule))
            assert 0.1 < wrong[19] / lambdas[19] < 10
