"""What the ranks tell each other in every step: messages by phase, and sums of tensors."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from kronfac import KFAC, Intervals
from kronfac.distributed import World
from tests.distributed.cases import perceptron, portion
from tests.distributed.ranks import Case

STEPS = 34
EXAMPLES = 24


def normalized() -> nn.Module:
    """Some of its examples are a mini-batch of their own, of which every rank draws its part."""
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def deep() -> nn.Module:
    """So many units that their counts do not fit into a first message."""
    layers = [module for _ in range(24) for module in (nn.Linear(5, 5), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(5, 3))


def told(
    rank: int, size: int, make: Callable[[], nn.Module] = perceptron, **settings: Any
) -> Mapping[str, Any]:
    """For every step: how often each phase had a message, sums of tensors, and what was measured."""
    model = make().double()
    optimizer = KFAC(model, nn.MSELoss(), **settings)
    world = World.current()
    assert world.size > 1
    found = []
    for k in range(STEPS):
        before, sums = Counter(world.messages), world.sums
        optimizer.step(optimizer.closure(*portion(k, EXAMPLES, rank, size)))
        report = optimizer.report
        assert report is not None
        found.append(
            {
                "messages": dict(world.messages - before),
                "sums": world.sums - sums,
                "validated": report.next_rho is not None,
                "measured": report.rho is not None,
            }
        )
    return {"steps": found}


CASES: dict[str, Case] = {
    "told": told,
    "told-normalized": partial(told, make=normalized, intervals=Intervals(statistics_fraction=0.5)),
    "told-deep": partial(told, make=deep),
}
