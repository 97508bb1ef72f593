"""The everyday optimizer on several ranks, each with a part of every mini-batch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kronfac import WhitenedMomentum
from kronfac.whitened_momentum import InputFactors
from tests.distributed.cases import STEPS, convolutional, flat, images, perceptron, regression
from tests.distributed.ranks import Case

EXAMPLES = 24


def train(
    rank: int,
    size: int,
    *,
    make: Callable[[], nn.Module] = perceptron,
    data: Callable[[int, int], tuple[Tensor, Tensor]] = regression,
    loss: nn.Module | None = None,
    chunks: int = 1,
    wrapped: bool = True,
    **settings: Any,
) -> Mapping[str, Any]:
    """Twenty steps with all rows sampled.

    Args:
        rank: of this process.
        size: how many there are.
        make: the model.
        data: the k-th mini-batch.
        loss: of outputs and targets.
        chunks: micro-batches of a rank.
        wrapped: whether the optimizer gets the wrapped model, or the one inside.
        settings: of the optimizer.
    """
    inner: nn.Module = make().double()
    loss = nn.MSELoss() if loss is None else loss
    model = DistributedDataParallel(inner)
    inputs = InputFactors(rows=None)  # at steps 0, 1, 2, 4, 8 and 16
    given = model if wrapped else inner
    optimizer = WhitenedMomentum(given, 0.02, **{"method": "polar", "inputs": inputs, **settings})
    for k in range(STEPS):
        x, y = (
            t[rank * EXAMPLES // size : (rank + 1) * EXAMPLES // size] for t in data(k, EXAMPLES)
        )
        optimizer.zero_grad()
        for xs, ys in zip(x.chunk(chunks), y.chunk(chunks), strict=True):
            (loss(model(xs), ys) / chunks).backward()
        optimizer.step()
    reports = torch.tensor([*optimizer.report.lr, optimizer.report.skipped], dtype=torch.float64)
    return {"parameters": flat(inner), "reports": reports}


CASES: dict[str, Case] = {
    "everyday": train,
    "everyday-whitened": partial(train, method="whitened", chunks=2, wrapped=False, steps=STEPS),
    "everyday-images": partial(
        train, make=convolutional, data=images, loss=nn.CrossEntropyLoss(), method="auto"
    ),
}
