"""Inverses that several ranks have made: blocks without one, ranks that fail, saved states."""

import copy
import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from kronfac import KFAC, Intervals
from kronfac.control import FixedGamma
from kronfac.curvature import ApproximateInverse, Curvature, DampedInverse
from kronfac.curvature.inverse import ChainOperator, Failed, PreparedInverse
from kronfac.extend import BlockDiagonalInverse, BlockTridiagonalInverse
from kronfac.storage import pack, tensors_in, unpack
from tests.distributed.cases import EXACT, FRACTIONS, flat, perceptron, train
from tests.distributed.disagreements import steps
from tests.distributed.ranks import Case

SIZE = 3
"""Ranks, each of which inverts one of three units, if they are not in a chain."""
GAMMA, STRONGER = 0.3, 1.0
BREAKS = 24.0 * 5
"""Examples of the statistics after which a unit has no inverse: those of five steps."""


@dataclass(frozen=True)
class Fragile(ApproximateInverse):
    """An inverse that, some steps on, has none for a unit, or one that is not finite."""

    fault: str
    rows: int = 6
    """The output features of that unit, the second one."""
    inner: ApproximateInverse = field(default_factory=BlockDiagonalInverse)

    @property
    def couples(self) -> bool:  # type: ignore[override]
        return self.inner.couples

    def prepare(self, curvature: Curvature) -> "Prepared":
        return Prepared(self, curvature, self.inner.prepare(curvature))


@dataclass(frozen=True)
class Prepared:
    strategy: Fragile
    curvature: Curvature
    inner: PreparedInverse

    def damped(self, gamma: float) -> DampedInverse:
        found, fault = self.inner.damped(gamma), self.strategy.fault
        if self.curvature.examples <= BREAKS or (fault == "damped" and gamma > STRONGER):
            return found
        pieces = []
        for piece in found.pieces:
            chained = isinstance(piece, ChainOperator)
            if not chained and not any(len(t) == self.strategy.rows for t in tensors_in(piece)[1:]):
                pieces.append(piece)
            elif fault == "failed" and not chained:
                pieces.append(Failed("as was to be shown"))
            else:
                copied = unpack(pack(piece))
                for tensor in tensors_in(copied):
                    tensor.fill_(torch.nan)
                pieces.append(copied)
        return replace(found, pieces=tuple(pieces))


FAULTS = {
    "damped": Fragile("damped"),
    "failed": Fragile("failed"),
    "not_finite": Fragile("not_finite"),
    "chain": Fragile("not_finite", inner=BlockTridiagonalInverse()),
}
"""Units that get more damping, keep their last inverse, or are taken out of a chain."""


def one_saves(rank: int, size: int) -> Mapping[str, Any]:
    """One rank alone saves a state with a refresh under way, which needs no message to the others."""
    lag: dict[str, Any] = {"intervals": Intervals(inverse_lag=3, inverse_interval=6)}
    optimizer = KFAC(perceptron().double(), nn.MSELoss(), **lag)
    steps(optimizer, rank, size, 7)
    saved = optimizer.state_dict()["kfac"]["refresh"]["iteration"] if rank == 0 else None
    steps(optimizer, rank, size, 3, start=7)
    return {"saved": saved, "parameters": flat(optimizer.model)}


def resume(rank: int, size: int, **settings: Any) -> Mapping[str, Any]:
    """Seven steps, then eight more: by the optimizer itself, from its state, by a copy."""
    model = perceptron().double()
    optimizer = KFAC(model, nn.MSELoss(), **settings)
    steps(optimizer, rank, size, 7)
    buffer = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], buffer)
    buffer.seek(0)
    parameters, state = torch.load(buffer, weights_only=True)
    other = perceptron().double()
    other.load_state_dict(parameters)
    loaded = KFAC(other, nn.MSELoss(), **settings)
    loaded.load_state_dict(state)
    runs = {"itself": optimizer, "copy": copy.deepcopy(optimizer), "loaded": loaded}
    found = {}
    for name, one in runs.items():
        steps(one, rank, size, 8, start=7)
        found[name] = flat(one.model)
    return {"found": found, "saved": buffer.getvalue()}


RESUMED = {
    "plain": FRACTIONS,
    "ekfac": {"inverse": "ekfac", **FRACTIONS},
    "tridiagonal": {"inverse": "block_tridiagonal", **FRACTIONS},
    "lag": {
        "intervals": Intervals(0.3, 0.5, inverse_interval=6, inverse_lag=3)
    },  # one is under way
}

CASES: dict[str, Case] = {
    f"repaired-{fault}": partial(
        train, inverse=inverse, gamma=FixedGamma(GAMMA), examples=24, **EXACT
    )
    for fault, inverse in FAULTS.items()
}
CASES |= {f"resumed-{name}": partial(resume, **settings) for name, settings in RESUMED.items()}
CASES["one_saves"] = one_saves
