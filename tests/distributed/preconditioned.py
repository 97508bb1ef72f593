"""The preconditioner in front of SGD on several ranks, and ranks that fail there."""

import io
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kronfac import Preconditioner
from tests.distributed.cases import (
    STEPS,
    Unseen,
    Words,
    all_words,
    convolutional,
    flat,
    images,
    part,
    perceptron,
    regression,
)
from tests.distributed.disagreements import attempt, broken
from tests.distributed.ranks import Case


def average(model: nn.Module, share: float) -> None:
    """The gradient of all examples from those of the ranks, as a loop without a wrapper has it."""
    for p in model.parameters():
        assert p.grad is not None
        p.grad.mul_(share)
        dist.all_reduce(p.grad)


def saved(preconditioner: Preconditioner) -> Tensor:
    """A state's tensors, one after another."""
    buffer = io.BytesIO()
    torch.save(preconditioner.state_dict(), buffer)
    found: list[Tensor] = []

    def collect(item: Any) -> None:
        if isinstance(item, Tensor):
            found.append(item.double().reshape(-1))
        elif isinstance(item, Mapping):
            for key in sorted(item, key=str):
                collect(item[key])
        elif isinstance(item, (list, tuple)):
            for one in item:
                collect(one)

    collect(torch.load(io.BytesIO(buffer.getvalue()), weights_only=True))
    return torch.cat(found)


def train(
    rank: int,
    size: int,
    *,
    make: Callable[[], nn.Module] = perceptron,
    data: Callable[[int, int], tuple[Tensor, Tensor]] = regression,
    loss: nn.Module | None = None,
    examples: int = 26,
    ddp: bool = False,
    late: bool = False,
    chunks: int = 1,
    lr: float = 0.02,
    **settings: Any,
) -> Mapping[str, Any]:
    """Twenty steps of SGD, every rank with its part of each mini-batch.

    Args:
        rank: of this process.
        size: how many there are.
        make: the model.
        data: the k-th mini-batch.
        loss: of outputs and targets.
        examples: of a mini-batch.
        ddp: whether gradients are averaged by DistributedDataParallel, else by the loop.
        late: whether they are averaged after they are preconditioned.
        chunks: micro-batches of a rank.
        lr: of SGD.
        settings: of the preconditioner.
    """
    model: nn.Module = make().double()
    inner, loss = model, nn.MSELoss() if loss is None else loss
    if ddp:
        assert examples % size == 0, "the objective is another one"
        model = DistributedDataParallel(model)
    sgd = torch.optim.SGD(inner.parameters(), lr=lr, momentum=0.9)
    preconditioner = Preconditioner(model, loss, damping=0.1, lr=lr, **settings)
    for k in range(STEPS):
        x, y = data(k, examples)
        own = part(examples, rank, size)
        if examples % size == 0:
            own = slice(rank * examples // size, (rank + 1) * examples // size)
        x, y = x[own], y[own]
        sgd.zero_grad()
        for xs, ys in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            outputs = model(xs)
            if outputs.dim() == 3:  # of every token
                outputs, ys = outputs.flatten(0, 1), ys.flatten()  # noqa: PLW2901
            (loss(outputs, ys) * (len(xs) / len(x))).backward()
        if not (ddp or late):
            average(inner, len(x) / examples)
        preconditioner.step()
        if late:
            average(inner, len(x) / examples)
        sgd.step()
    reports = torch.tensor([preconditioner.steps], dtype=torch.float64)
    return {"parameters": flat(inner), "reports": reports, "state": saved(preconditioner)}


WORDS: dict[str, Any] = {"make": Words, "data": all_words, "loss": nn.CrossEntropyLoss()}
IMAGES: dict[str, Any] = {"make": convolutional, "data": images, "loss": nn.CrossEntropyLoss()}
SOME: dict[str, Any] = {"statistics_fraction": 0.3}

CASES: dict[str, Case] = {
    "front": partial(train, **SOME),
    "front-late": partial(train, late=True, **SOME),
    "front-ddp": partial(train, ddp=True, examples=24, **SOME),
    "front-ekfac": partial(train, inverse="ekfac", inverse_interval=3, **SOME),
    "front-exact": partial(train, fisher="exact", factor_interval=2, inverse_interval=4),
    "front-accumulated": partial(train, ddp=True, examples=24, chunks=2, **SOME),
    "front-clipped": partial(train, kl_clip=1e-3, **SOME),
    "front-unseen": partial(train, make=Unseen, **SOME),
    "front-words": partial(train, **WORDS, **SOME),
    "front-images": partial(train, **IMAGES, **SOME),
}


def fail_once(
    rank: int, size: int, fault: Callable[[Preconditioner, int, int], str]
) -> Mapping[str, Any]:
    """Three steps, a fault on the last rank, three steps; and the same without a fault."""
    found: dict[str, Any] = {}
    for name in ("disturbed", "undisturbed"):
        model = perceptron().double()
        sgd = torch.optim.SGD(model.parameters(), lr=0.02)
        preconditioner = Preconditioner(model, nn.MSELoss(), damping=0.1)

        def backward(
            k: int, factor: float = 1.0, model: nn.Module = model, sgd: torch.optim.SGD = sgd
        ) -> None:
            x, y = regression(k, 4 * size)
            own = slice(4 * rank, 4 * rank + 4)
            sgd.zero_grad()
            nn.MSELoss()(model(x[own]), y[own]).backward()
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(factor)

        for k in range(6):
            if k == 3 and name == "disturbed":
                backward(
                    9, float("nan") if fault is one_is_not_finite and rank == size - 1 else 1.0
                )
                before = _gradients(model)
                found["said"] = fault(preconditioner, rank, size)
                pairs = zip(before, _gradients(model), strict=True)
                found["moved"] = not all(torch.equal(a, b) for a, b in pairs)
            backward(k)
            preconditioner.step()
            average(model, 1 / size)
            sgd.step()
        found[name] = flat(model)
    return found


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.nan_to_num().clone() for p in model.parameters() if p.grad is not None]


def one_is_not_finite(preconditioner: Preconditioner, rank: int, size: int) -> str:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="A gradient is not finite")
        return attempt(preconditioner.step)


PLACES = {
    "gradients_raise": "kronfac.preconditioner._finite",
    "statistics_raise": "kronfac.step.examples.estimate",
    "product_raises": "kronfac.curvature.inverse.DampedInverse.mv",
}
"""Functions that fail on one rank."""
FAULTS: dict[str, Callable[[Preconditioner, int, int], str]] = {
    "one_is_not_finite": one_is_not_finite,
    **{
        name: lambda it, rank, size, place=place: broken(place, rank, size, it.step)  # type: ignore[misc]
        for name, place in PLACES.items()
    },
}
BROKEN: dict[str, Case] = {
    f"front-{name}": partial(fail_once, fault=fault) for name, fault in FAULTS.items()
}


def other_steps(rank: int, size: int) -> Mapping[str, Any]:
    """One rank goes on from a saved state, the others from the beginning."""
    model = perceptron().double()
    preconditioner = Preconditioner(model, nn.MSELoss(), damping=0.1)
    x, y = regression(0, 8)
    nn.MSELoss()(model(x), y).backward()
    if rank == 0:
        preconditioner.steps = 3
    return {"said": attempt(preconditioner.step)}


BROKEN["front-other_steps"] = other_steps
