"""Runs in which a part of the ranks holds the inverse of each unit, and what these hold and send."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import kronfac
from kronfac import KFAC, Plan, World
from kronfac.control import ConjugateGradients, FixedGamma
from kronfac.distributed import Processes
from kronfac.storage import tensors_in
from tests.distributed.cases import (
    EXACT,
    FRACTIONS,
    Words,
    convolutional,
    generator,
    images,
    part,
    train,
    words,
)
from tests.distributed.ranks import Case

INTERVAL, EXAMPLES = 4, 24
ALL: dict[str, Any] = {"statistics_fraction": 1.0, "fisher_fraction": 1.0}
SHARES = (1.0, 0.5, 0.25)
INVERSES = ("block_diagonal", "block_tridiagonal", "ekfac")
KINDS: dict[str, dict[str, Any]] = {
    **{inverse: {"inverse": inverse, **FRACTIONS} for inverse in INVERSES},
    **{
        f"{inverse}-ddp": {"inverse": inverse, "ddp": True, "examples": 24, **EXACT}
        for inverse in INVERSES
    },
    "own": {"loop": "own", "weight_decay": 1e-3, **EXACT},
    "lag": {"inverse_lag": 2, "inverse_interval": 5, **FRACTIONS},
    "ekfac-lag": {"inverse": "ekfac", "inverse_lag": 2, "inverse_interval": 5, **FRACTIONS},
    "conjugate": {"step_size": ConjugateGradients(cg_steps=3), **EXACT},
    "convolutional": {
        "make": convolutional,
        "data": images,
        "loss": nn.CrossEntropyLoss(),
        **FRACTIONS,
    },
    "words": {
        "make": Words,
        "data": words,
        "loss": nn.CrossEntropyLoss(ignore_index=-100),
        **EXACT,
    },
    "fsdp": {"fsdp": True, "examples": 24, **EXACT},
}
"""Settings of runs, all with every share."""


def name_of(kind: str, share: float) -> str:
    return f"held-{kind}-{share}"


def even() -> nn.Module:
    """A perceptron whose factors have even sizes: a packed matrix of an odd size has a row of padding.

    And none of size 2, for which a basis may be symmetric, and travel packed. With drawn targets, as the
    last G of squared errors is the identity otherwise, and so is its basis.
    """
    torch.manual_seed(6)
    layers = [nn.Linear(a, b, bias=False) for a, b in ((6, 8), (8, 6), (6, 4))]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2]).double()


def even_data() -> tuple[Tensor, Tensor]:
    x = torch.randn(EXAMPLES, 6, generator=generator(0), dtype=torch.float64)
    return x, torch.stack([x.sum(1).sin(), x[:, 0] * x[:, 1], x[:, 2].abs(), x[:, 3]], 1)


def measure(rank: int, size: int, *, share: float, inverse: str) -> Mapping[str, Any]:
    """Bytes of inverses that a rank holds, and of tensors that it sends or receives, step by step."""
    settings: dict[str, Any] = {
        "inverse": inverse,
        "inverse_interval": INTERVAL,
        "gamma": FixedGamma(0.3),  # one candidate
        **ALL,
    }
    optimizer = KFAC(even(), nn.MSELoss(), inverse_share=share, **settings)
    world = Processes.current()
    assert isinstance(world, Processes)
    x, y = even_data()
    own = part(EXAMPLES, rank, size)
    travelled = []
    for _ in range(2 * INTERVAL):
        before = world.tally.bytes
        optimizer.step(optimizer.closure(x[own], y[own]))
        travelled.append(world.tally.bytes - before)
    current = optimizer._state.current
    assert current is not None
    held = sum(t.numel() * t.element_size() for t in tensors_in(current.inverse))
    return {"held": held, "travelled": torch.tensor(travelled)}


def planned(size: int, share: float, inverse: str) -> Plan:
    """The plan of the same."""
    return kronfac.plan(
        even(),
        nn.MSELoss(),
        *even_data(),
        world=World(size, inverse_share=share, flops=1e9),
        inverse=inverse,
        inverse_interval=INTERVAL,
        gamma=FixedGamma(0.3),
        **ALL,
    )


HELD: dict[str, Case] = {
    name_of(kind, share): partial(train, inverse_share=share, **settings)
    for kind, settings in KINDS.items()
    for share in SHARES
}
HELD |= {
    f"measured-{inverse}-{share}": partial(measure, share=share, inverse=inverse)
    for inverse in INVERSES
    for share in SHARES
}
HELD["held-uneven"] = partial(train, inverse_share=0.4, **FRACTIONS)
