"""Training runs that have to end at the same parameters in any number of processes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kronfac import KFAC, Intervals
from kronfac.control import ConjugateGradients
from tests.distributed.ranks import Case

STEPS = 20


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def perceptron() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def convolutional() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.LayerNorm(36),
        nn.Linear(36, 3),
    )


class Unseen(nn.Module):
    """A layer whose weight is a function of a parameter, of which no more is seen than its gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(5, 6)
        self.raw = nn.Parameter(torch.randn(3, 6) / 2)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (examples, 3)."""
        return nn.functional.linear(torch.tanh(self.first(x)), self.raw.tanh())


class Words(nn.Module):
    """A tied embedding and head, with attention in between.

    In plain operations: fused attention has no forward mode, and the rounding errors of finite differences
    are larger than what is allowed here.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(7, 8)
        self.queries, self.keys, self.values = (nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.inner, self.outer = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (examples, places, words)."""
        x = self.embed(tokens)
        weights = (self.queries(x) @ self.keys(x).mT / 8**0.5).softmax(-1)
        x = self.norm(x + weights @ self.values(x))
        logits: Tensor = self.head(x + self.outer(self.inner(x).relu()))
        return logits


def regression(k: int, n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 5, generator=generator(k), dtype=torch.float64)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1], x[:, 2].abs()], 1)


def images(k: int, n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 2, 5, 5, generator=generator(k), dtype=torch.float64)
    return x, (x[:, 0].mean((1, 2)) > 0).long() + (x[:, 1].mean((1, 2)) > 0).long()


def words(k: int, n: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(7, (n, 4), generator=generator(k))
    targets = tokens.roll(1, 1)
    targets[tokens == 0] = -100  # as many as fall on a rank
    return tokens, targets


def all_words(k: int, n: int) -> tuple[Tensor, Tensor]:
    tokens, _ = words(k, n)
    return tokens, tokens.roll(1, 1)


def part(n: int, rank: int, size: int) -> slice:
    """Examples of a rank: a few more on the first ones."""
    ends = [0]
    for r in range(size):
        ends.append(ends[-1] + (n - ends[-1] + (size - r) // 2 + (r == 0)) // (size - r))
    return slice(ends[rank], n if rank == size - 1 else ends[rank + 1])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(
    rank: int,
    size: int,
    *,
    make: Callable[[], nn.Module] = perceptron,
    data: Callable[[int, int], tuple[Tensor, Tensor]] = regression,
    loss: nn.Module | None = None,
    examples: int = 26,
    loop: str = "closure",
    ddp: bool = False,
    **settings: Any,
) -> Mapping[str, Any]:
    """Twenty steps, every rank with its part of each mini-batch."""
    model: nn.Module = make().double()
    inner = model
    loss = nn.MSELoss() if loss is None else loss
    even = examples % size == 0
    if ddp:
        assert even, "the objective is another one"
        model = DistributedDataParallel(model)
    optimizer = KFAC(model if ddp and loop != "inner" else inner, loss, **settings)
    reports, events = [], []
    for k in range(STEPS):
        x, y = data(k, examples)
        own = part(examples, rank, size)
        if even:
            own = slice(rank * examples // size, (rank + 1) * examples // size)
        x, y = x[own], y[own]
        if loop == "own":
            optimizer.step(optimizer.closure(x, y))
        elif loop == "closure":

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                outputs = model(x)
                if outputs.dim() == 3:  # of every token
                    outputs, y = outputs.flatten(0, 1), y.flatten()
                value: Tensor = loss(outputs, y)
                value.backward()
                return value

            optimizer.step(closure)
        else:
            optimizer.zero_grad()
            chunks = 2 if loop == "accumulated" else 1
            for xs, ys in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
                value = loss(model(xs), ys)
                (value * (len(xs) / len(x))).backward()
            if loop == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        report = optimizer.report
        assert report is not None
        reports.append([report.loss, report.lambda_, report.gamma, report.alpha or 0.0])
        events += [f"{k}: {event.kind.name}" for event in report.events]
    numbers = torch.tensor(reports, dtype=torch.float64)
    return {"parameters": flat(inner), "reports": numbers, "events": events}


EXACT: dict[str, Any] = {
    "fisher": "exact",
    "intervals": Intervals(1.0, 1.0),
}
FRACTIONS: dict[str, Any] = {"intervals": Intervals(0.3, 0.5)}
LAGGED = Intervals(0.3, 0.5, inverse_interval=5, inverse_lag=2)

CASES: dict[str, Case] = {
    "own": partial(train, loop="own", **EXACT),
    "own-sampled": partial(train, loop="own", **FRACTIONS),
    # Targets in three blocks, whose borders are not those of the ranks.
    "many-sampled": partial(train, examples=2102, intervals=Intervals(1.0, 0.1)),
    "first-few": partial(train, intervals=Intervals(0.05, 0.1)),
    "sum": partial(train, loss=nn.MSELoss(reduction="sum"), weight_decay=1e-3, **EXACT),
    "loop": partial(train, loop="loop", weight_decay=1e-3, **EXACT),
    "accumulated": partial(train, loop="accumulated", examples=24, **EXACT),
    "convolutional": partial(
        train, make=convolutional, data=images, loss=nn.CrossEntropyLoss(), **FRACTIONS
    ),
    "words": partial(
        train, make=Words, data=words, loss=nn.CrossEntropyLoss(ignore_index=-100), **EXACT
    ),
    # As many places count on a rank as fall on it.
    "words-sampled": partial(
        train,
        make=Words,
        data=words,
        loss=nn.CrossEntropyLoss(ignore_index=-100),
        intervals=Intervals(1.0, 0.5),
    ),
    "unseen-exact": partial(train, make=Unseen, **EXACT),
    "unseen-sampled": partial(train, make=Unseen, **FRACTIONS),
    "unseen-accumulated": partial(
        train, make=Unseen, loop="accumulated", examples=24, ddp=True, **FRACTIONS
    ),
    "ddp-clipped": partial(train, loop="clipped", ddp=True, examples=24, **EXACT),
    "lag": partial(train, intervals=LAGGED),
    "ekfac-lag": partial(train, inverse="ekfac", intervals=LAGGED),
    "conjugate": partial(train, step_rule=ConjugateGradients(cg_steps=3), **EXACT),
    "paper": partial(
        train, step_rule=None, intervals=Intervals(1.0, 1.0, 3), weight_decay=1e-4, fisher="exact"
    ),
}
for inverse in ("block_diagonal", "block_tridiagonal", "ekfac"):
    CASES[inverse] = partial(train, inverse=inverse, **EXACT)
    CASES[f"{inverse}-sampled"] = partial(train, inverse=inverse, **FRACTIONS)
    CASES[f"{inverse}-ddp"] = partial(train, inverse=inverse, ddp=True, examples=24, **EXACT)
for kind in ("closure", "loop", "inner", "own", "accumulated"):
    CASES[f"ddp-{kind}"] = partial(train, ddp=True, examples=24, loop=kind, **FRACTIONS)
