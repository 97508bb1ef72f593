"""The preconditioner in front of SGD on several ranks, of which one fails."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kronfac import Preconditioner
from tests.distributed.cases import Front, flat, front, perceptron, portion, regression
from tests.distributed.disagreements import attempt, broken
from tests.distributed.ranks import Case


def fail_once(
    rank: int, size: int, fault: Callable[[Preconditioner, int, int], str]
) -> Mapping[str, Any]:
    """Three steps, a fault on the last rank, three steps; and the same without a fault."""
    found: dict[str, Any] = {}
    for name in ("disturbed", "undisturbed"):
        model = perceptron().double()
        optimizer = front(model, nn.MSELoss(), examples=4 * size, late=True)

        def backward(
            k: int, factor: float = 1.0, model: nn.Module = model, optimizer: Front = optimizer
        ) -> None:
            x, y = portion(k, 4 * size, rank, size)
            optimizer.zero_grad()
            (nn.MSELoss()(model(x), y) * factor).backward()

        for k in range(6):
            if k == 3 and name == "disturbed":
                broken_here = fault is one_is_not_finite and rank == size - 1
                backward(9, float("nan") if broken_here else 1.0)
                before = _gradients(model)
                found["said"] = fault(optimizer.own, rank, size)
                pairs = zip(before, _gradients(model), strict=True)
                found["moved"] = not all(torch.equal(a, b) for a, b in pairs)
            backward(k)
            optimizer.step()
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
CASES: dict[str, Case] = {
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


CASES["front-other_steps"] = other_steps
