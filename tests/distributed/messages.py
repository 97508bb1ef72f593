"""What the ranks tell each other in every step: messages by phase, and sums of tensors."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import nn

from kronfac import KFAC
from kronfac.distributed import Phase, Processes
from kronfac.distributed.reduction import StartedReduction
from tests.distributed.cases import perceptron, regression
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
    world = Processes.current()
    assert isinstance(world, Processes)
    own = slice(rank * EXAMPLES // size, (rank + 1) * EXAMPLES // size)
    found = []
    for k in range(STEPS):
        x, y = regression(k, EXAMPLES)
        before, sums = Counter(world.tally.messages), world.tally.sums
        optimizer.step(optimizer.closure(x[own], y[own]))
        report = optimizer.report
        assert report is not None
        found.append(
            {
                "messages": dict(world.tally.messages - before),
                "sums": world.tally.sums - sums,
                "validated": report.next_rho is not None,
                "measured": report.rho is not None,
            }
        )
    return {"steps": found}


def order(rank: int, size: int) -> Mapping[str, Any]:
    """Messages, starts of sums and waits for them in the last step, one after another."""
    model = perceptron().double()
    optimizer = KFAC(model, nn.MSELoss(), inverse_interval=100)
    own = slice(rank * EXAMPLES // size, (rank + 1) * EXAMPLES // size)
    events: list[str] = []
    gather, start, wait = Processes.gather, StartedReduction.start, StartedReduction.wait

    def gathered(self: Processes, phase: Phase, numbers: Sequence[float]) -> list[list[float]]:
        events.append(phase.name)
        return gather(self, phase, numbers)

    def started(self: StartedReduction, factor: float = 1.0) -> None:
        events.append("start")
        start(self, factor)

    def waited(self: StartedReduction) -> None:
        events.append("wait")
        wait(self)

    with (
        patch.object(Processes, "gather", gathered),
        patch.object(StartedReduction, "start", started),
        patch.object(StartedReduction, "wait", waited),
    ):
        for k in range(22):
            events.clear()
            x, y = regression(k, EXAMPLES)
            optimizer.step(optimizer.closure(x[own], y[own]))
    return {"events": events}


CASES: dict[str, Case] = {
    "order": order,
    "told": told,
    "told-normalized": partial(told, make=normalized, statistics_fraction=0.5),
    "told-deep": partial(told, make=deep),
}
