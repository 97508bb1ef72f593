"""Ranks that fail or do something else than the others: what every rank finds then."""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from kronfac import KFAC
from kronfac.errors import RankError
from tests.distributed.cases import Batch, flat, perceptron, portion
from tests.distributed.ranks import Case

EXAMPLES = 12


class BrokenError(RuntimeError):
    """A fault of one rank."""


def batch(k: int, rank: int, size: int) -> Batch:
    return portion(k, EXAMPLES, rank, size)


def attempt(take: Callable[[], Any]) -> str:
    """What a step raises; nothing if it is taken."""
    try:
        take()
    except (RankError, BrokenError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def steps(optimizer: KFAC, rank: int, size: int, number: int, start: int = 0) -> None:
    for k in range(start, start + number):
        optimizer.step(optimizer.closure(*batch(k, rank, size)))


def fail_once(
    rank: int, size: int, fault: Callable[[KFAC, int, int], str], **settings: Any
) -> Mapping[str, Any]:
    """Three steps, a fault on the last rank, three steps; and the same without a fault."""
    found: dict[str, Any] = {}
    for name in ("disturbed", "undisturbed"):
        model = perceptron().double()
        optimizer = KFAC(model, nn.MSELoss(), **settings)
        steps(optimizer, rank, size, 3)
        if name == "disturbed":
            before = flat(model)
            found["said"] = fault(optimizer, rank, size)
            found["moved"] = not torch.equal(flat(model), before)
            found["refused"] = optimizer.report is not None and optimizer.report.refused
        steps(optimizer, rank, size, 3, start=3)
        found[name] = flat(model)
    return found


def closure_raises(optimizer: KFAC, rank: int, size: int) -> str:
    x, y = batch(9, rank, size)
    inner = optimizer.closure(x, y)

    def closure() -> Tensor:
        if rank == size - 1:
            raise BrokenError("no more examples")
        return inner()

    return attempt(lambda: optimizer.step(closure))


def broken(place: str, rank: int, size: int, take: Callable[[], Any]) -> str:
    """What a step raises if a function of kronfac's fails on the last rank."""
    if rank < size - 1:
        return attempt(take)
    with patch(place, side_effect=BrokenError("no memory left")):
        return attempt(take)


def broken_step(optimizer: KFAC, rank: int, size: int, place: str) -> str:
    x, y = batch(9, rank, size)
    return broken(place, rank, size, lambda: optimizer.step(optimizer.closure(x, y)))


PLACES = {
    "statistics_raise": "kronfac.step.examples.estimate",
    # After gradients and statistics were summed.
    "products_raise": "kronfac.step.proposal.fisher_gram",
    # After the last number of a step is known, and before the ranks have agreed on it.
    "commit_raises": "kronfac.step.take.agree",
    "inverse_raises": "kronfac.curvature.inverse._multiply",
}
"""Functions that fail on one rank."""


def one_is_not_finite(optimizer: KFAC, rank: int, size: int) -> str:
    x, y = batch(9, rank, size)
    if rank == size - 1:
        x = x * float("nan")
    return attempt(lambda: optimizer.step(optimizer.closure(x, y)))


def other_parameters(rank: int, size: int) -> Mapping[str, Any]:
    torch.manual_seed(rank)
    model = nn.Linear(5, 3).double()
    before = flat(model)
    optimizer = KFAC(model, nn.MSELoss())
    said = attempt(lambda: steps(optimizer, rank, size, 1))
    return {"said": said, "moved": not torch.equal(flat(model), before)}


def other_network(rank: int, size: int) -> Mapping[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=rank > 0).double()
    optimizer = KFAC(model, nn.MSELoss())
    return {"said": attempt(lambda: steps(optimizer, rank, size, 1))}


def other_place(rank: int, size: int) -> Mapping[str, Any]:
    """One rank leaves out a message, and goes on to the next."""
    model = perceptron().double()
    optimizer = KFAC(model, nn.MSELoss())
    x, y = batch(0, rank, size)
    if rank:
        return {"said": attempt(lambda: optimizer.step(optimizer.closure(x, y)))}
    with patch("kronfac.curvature.estimate._sum_over_ranks", return_value=[True] * 3):
        return {"said": attempt(lambda: optimizer.step(optimizer.closure(x, y)))}


def other_sums(rank: int, size: int) -> Mapping[str, Any]:
    """One rank leaves out a sum, which the others wait for; the case to end with."""
    model = perceptron().double()
    optimizer = KFAC(model, nn.MSELoss())
    steps(optimizer, rank, size, 2)
    before = flat(model)
    if rank:
        said = attempt(lambda: steps(optimizer, rank, size, 1, start=2))
    else:
        with patch("kronfac.step.collect._sum_gradients", return_value=None):
            said = attempt(lambda: steps(optimizer, rank, size, 1, start=2))
    return {"said": said, "moved": not torch.equal(flat(model), before)}


def killed(rank: int, size: int) -> Mapping[str, Any]:
    """The last rank dies in a closure; the case to end with."""
    model = perceptron().double()
    optimizer = KFAC(model, nn.MSELoss())
    steps(optimizer, rank, size, 2)
    before = flat(model)
    if rank == size - 1:
        os._exit(0)
    start = time.monotonic()
    said = attempt(lambda: steps(optimizer, rank, size, 1, start=2))
    seconds = time.monotonic() - start
    return {"said": said, "moved": not torch.equal(flat(model), before), "seconds": seconds}


FAULTS: dict[str, Callable[[KFAC, int, int], str]] = {
    "closure_raises": closure_raises,
    "one_is_not_finite": one_is_not_finite,
    **{name: partial(broken_step, place=place) for name, place in PLACES.items()},
}
CASES: dict[str, Case] = {name: partial(fail_once, fault=fault) for name, fault in FAULTS.items()}
CASES |= {case.__name__: case for case in (other_parameters, other_network, other_place)}
DEADLY: dict[str, Case] = {"killed": killed, "other_sums": other_sums}
CASES |= DEADLY
