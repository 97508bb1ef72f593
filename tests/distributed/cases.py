"""Training runs that have to end at the same parameters in any number of processes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kronfac import KFAC, ConjugateGradients, Intervals, Preconditioner, WhitenedMomentum
from kronfac.storage import tensors_in
from kronfac.whitened_momentum import InputFactors
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


Batch = tuple[Tensor, Tensor]
Data = Callable[[int, int], Batch]


def regression(k: int, n: int) -> Batch:
    x = torch.randn(n, 5, generator=generator(k), dtype=torch.float64)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1], x[:, 2].abs()], 1)


def images(k: int, n: int) -> Batch:
    x = torch.randn(n, 2, 5, 5, generator=generator(k), dtype=torch.float64)
    return x, (x[:, 0].mean((1, 2)) > 0).long() + (x[:, 1].mean((1, 2)) > 0).long()


def words(k: int, n: int) -> Batch:
    tokens = torch.randint(7, (n, 4), generator=generator(k))
    targets = tokens.roll(1, 1)
    targets[tokens == 0] = -100  # as many as fall on a rank
    return tokens, targets


def all_words(k: int, n: int) -> Batch:
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


def portion(k: int, examples: int, rank: int, size: int, data: Data = regression) -> Batch:
    """A rank's part of the k-th mini-batch: equal parts, if there are."""
    own = part(examples, rank, size)
    if examples % size == 0:
        own = slice(rank * examples // size, (rank + 1) * examples // size)
    x, y = data(k, examples)
    return x[own], y[own]


class Front:
    """A preconditioner in front of SGD.

    Args:
        model: maybe wrapped.
        loss: of outputs and targets.
        share: of this rank in each mini-batch; None if DistributedDataParallel averages gradients.
        late: whether they are averaged after they are preconditioned.
        settings: of the preconditioner.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        share: Callable[[], float] | None,
        late: bool = False,
        **settings: Any,
    ) -> None:
        self.model, self.share, self.late = model, share, late
        self.sgd = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        self.own = Preconditioner(model, loss, **{"damping": 0.1, "lr": 0.02, **settings})

    def zero_grad(self) -> None:
        self.sgd.zero_grad()

    def step(self) -> None:
        if not self.late:
            self._average()
        self.own.step()
        if self.late:
            self._average()
        self.sgd.step()

    def _average(self) -> None:
        """The gradient of all examples from those of the ranks, as a loop without a wrapper has it."""
        for p in self.model.parameters() if self.share else ():
            assert p.grad is not None
            p.grad.mul_(self.share())
            dist.all_reduce(p.grad)


def front(
    model: nn.Module, loss: nn.Module, ddp: bool = False, examples: int = 26, **settings: Any
) -> Front:
    def share() -> float:
        return len(portion(0, examples, dist.get_rank(), dist.get_world_size())[0]) / examples

    return Front(model, loss, None if ddp else share, **settings)


def everyday(model: nn.Module, loss: nn.Module, **settings: Any) -> WhitenedMomentum:
    inputs = InputFactors(rows=None)  # of all rows, at steps 0, 1, 2, 4, 8 and 16
    return WhitenedMomentum(model, 0.02, **{"method": "polar", "inputs": inputs, **settings})


def numbers(optimizer: Any) -> list[float]:
    """Numbers that all ranks have to agree on after a step."""
    if isinstance(optimizer, Front):
        return [float(optimizer.own.steps)]
    report = optimizer.report
    if isinstance(optimizer, KFAC):
        return [report.loss, report.lambda_, report.gamma, report.alpha or 0.0]
    return [*report.lr, report.skipped]


def train(
    rank: int,
    size: int,
    *,
    build: Callable[..., Any] = KFAC,
    make: Callable[[], nn.Module] = perceptron,
    data: Data = regression,
    loss: nn.Module | None = None,
    examples: int = 26,
    loop: str = "closure",
    chunks: int = 1,
    ddp: bool = False,
    **settings: Any,
) -> Mapping[str, Any]:
    """Twenty steps, every rank with its part of each mini-batch.

    Args:
        rank: of this process.
        size: how many there are.
        build: the optimizer, from model, loss and settings.
        make: the model.
        data: the k-th mini-batch.
        loss: of outputs and targets.
        examples: of a mini-batch.
        loop: "own" for `KFAC.closure`, "closure" for one of the loop's, else "loop"; "clipped" clips, and
            with "inner" the optimizer gets the module inside of DistributedDataParallel.
        chunks: micro-batches of a rank.
        ddp: whether the model is wrapped.
        settings: of the optimizer.
    """
    inner = make().double()
    model, loss = inner, nn.MSELoss() if loss is None else loss
    if ddp:
        assert examples % size == 0, "the objective is another one"
        model = DistributedDataParallel(model)
    optimizer = build(inner if loop == "inner" else model, loss, **settings)
    reports, events = [], []
    for k in range(STEPS):
        x, y = portion(k, examples, rank, size, data)

        def passes(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            for xs, ys in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
                outputs = model(xs)
                if outputs.dim() == 3:  # of every token
                    outputs, ys = outputs.flatten(0, 1), ys.flatten()  # noqa: PLW2901
                value: Tensor = loss(outputs, ys)
                (value * (len(xs) / len(x))).backward()
            return value

        if loop == "own":
            optimizer.step(optimizer.closure(x, y))
        elif loop == "closure":
            optimizer.step(passes)
        else:
            passes()
            if loop == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        reports.append(numbers(optimizer))
        if isinstance(optimizer, KFAC):
            events += [f"{k}: {event.kind.name}" for event in optimizer.report.events]
    found = {"parameters": flat(inner), "reports": torch.tensor(reports, dtype=torch.float64)}
    if isinstance(optimizer, Front):
        state = tensors_in(optimizer.own.state_dict())
        found["state"] = torch.cat([t.double().reshape(-1) for t in state])
    return {**found, "events": events}


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
    "accumulated": partial(train, loop="loop", chunks=2, examples=24, **EXACT),
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
        train, make=Unseen, loop="loop", chunks=2, examples=24, ddp=True, **FRACTIONS
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
for kind in ("closure", "loop", "inner", "own"):
    CASES[f"ddp-{kind}"] = partial(train, ddp=True, examples=24, loop=kind, **FRACTIONS)
CASES["ddp-accumulated"] = partial(CASES["ddp-loop"], chunks=2)

FRONT = partial(train, build=front, loop="loop")
SOME: dict[str, Any] = {"statistics_fraction": 0.3}
IMAGES: dict[str, Any] = {"make": convolutional, "data": images, "loss": nn.CrossEntropyLoss()}
CASES |= {
    "front": partial(FRONT, **SOME),
    "front-late": partial(FRONT, late=True, **SOME),
    "front-ddp": partial(FRONT, build=partial(front, ddp=True), ddp=True, examples=24, **SOME),
    "front-ekfac": partial(FRONT, inverse="ekfac", inverse_interval=3, **SOME),
    "front-exact": partial(FRONT, fisher="exact", factor_interval=2, inverse_interval=4),
    "front-clipped": partial(FRONT, kl_clip=1e-3, **SOME),
    "front-unseen": partial(FRONT, make=Unseen, **SOME),
    "front-words": partial(FRONT, make=Words, data=all_words, loss=nn.CrossEntropyLoss(), **SOME),
    "front-images": partial(FRONT, **IMAGES, **SOME),
}
CASES["front-accumulated"] = partial(CASES["front-ddp"], chunks=2)

EVERYDAY = partial(train, build=everyday, loop="loop", ddp=True, examples=24)
CASES |= {
    "everyday": EVERYDAY,
    "everyday-whitened": partial(EVERYDAY, loop="inner", chunks=2, method="whitened", steps=STEPS),
    "everyday-images": partial(EVERYDAY, method="auto", **IMAGES),
}
