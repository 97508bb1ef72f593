"""Who races on networks: K-FAC as it comes, and first-order methods with the rates that they are tuned on.

A variant of K-FAC is one line, `_kfac(name, label, …)` with the arguments of `KFAC`. Learning rates of
a first-order method follow a schedule over the seconds of its run.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kronfac import KFAC
from kronfac_experiments.bench.race.muon import Muon
from kronfac_experiments.bench.race.soap import SOAP

WEIGHT_DECAY = 0.01
"""AdamW's default in PyTorch, for all that have a decoupled one."""
WARM_UP = 0.05
"""Share of a run in which the rate rises to its peak, with a cosine schedule."""
LAST_RATE = 0.01
"""Share of the peak at the end of the cosine."""
SGD_MOMENTUM = 0.9
Schedule = Literal["constant", "cosine"]


class Steps:
    """Steps of a first-order method, at the rate that its schedule has for the time."""

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[float], float],
        clip: float | None,
    ) -> None:
        self.optimizer = optimizer
        self._model, self._loss, self._rate, self._clip = model, loss, rate, clip

    def step(self, x: Tensor, y: Tensor, share: float) -> None:
        """One step on a mini-batch, after `share` of the run's seconds."""
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate(share)
        self._model.zero_grad()
        self._loss(self._model(x), y).backward()
        if self._clip is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self.optimizer.step()


class KfacSteps:
    """Steps of K-FAC, which has neither rate nor schedule."""

    def __init__(self, optimizer: KFAC) -> None:
        self.optimizer = optimizer

    def step(self, x: Tensor, y: Tensor, share: float) -> None:
        """One step on a mini-batch."""
        self.optimizer.step(self.optimizer.closure(x, y))


@dataclass(frozen=True)
class Racer:
    """One of the field.

    Args:
        name: On the command line.
        label: In tables.
        rates: Peak learning rates that are tried; none for K-FAC, which is not tuned.
        build: Makes the optimizer of a model at a rate; None for K-FAC.
        schedule: Of the rate.
        remark: How it is set up.
        options: Arguments of `KFAC`.
        on_request: Whether it races only if it is named.
        in_units: Whether its rates are for a loss of the usual size: they are divided by a problem's own.
    """

    name: str
    label: str
    rates: tuple[float, ...] = ()
    build: Callable[[nn.Module, float], torch.optim.Optimizer] | None = None
    schedule: Schedule = "constant"
    remark: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    on_request: bool = False
    in_units: bool = False

    def rates_for(self, loss_scale: float) -> tuple[float, ...]:
        """Its rates for a loss that is `loss_scale` times the usual size."""
        scale = loss_scale if self.in_units else 1.0
        return tuple(rate / scale for rate in self.rates)

    @property
    def is_kfac(self) -> bool:
        """Whether it is a variant of K-FAC."""
        return self.build is None

    def steps(
        self, model: nn.Module, loss: nn.Module, lr: float | None, clip: float | None
    ) -> Steps | KfacSteps:
        """Make it for a model."""
        if self.build is None:
            return KfacSteps(KFAC(model, loss, **self.options))
        assert lr is not None
        rate = (lambda share: lr) if self.schedule == "constant" else cosine(lr)
        return Steps(model, loss, self.build(model, lr), rate, clip)


def cosine(peak: float) -> Callable[[float], float]:
    """Linear rise over `WARM_UP` of the run, then half a cosine to `LAST_RATE` of the peak."""

    def rate(share: float) -> float:
        if share < WARM_UP:
            return peak * max(share / WARM_UP, LAST_RATE)
        fallen = min(1.0, (share - WARM_UP) / (1 - WARM_UP))
        return peak * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * fallen)) / 2)

    return rate


def _adamw(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=WEIGHT_DECAY)


def _sgd(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=SGD_MOMENTUM, nesterov=True)


def _muon(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Hidden weights and convolutions are its matrices; embeddings and the last layer are not."""
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    weights = [p for p in model.parameters() if p.ndim >= 2]
    hidden = [p for p in weights[:-1] if id(p) not in embeddings]
    return Muon(model.parameters(), lr, WEIGHT_DECAY, matrices=hidden)


def _soap(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    return SOAP(model.parameters(), lr, WEIGHT_DECAY)


def _kfac(name: str, label: str, remark: str = "", **options: Any) -> Racer:
    return Racer(name, label, remark=remark, options=options, on_request=bool(options))


ADAPTIVE = (1e-3, 3e-3, 1e-2, 3e-2)
ORTHOGONAL = (3e-3, 1e-2, 3e-2, 1e-1)
MOMENTUM_RATES = (0.03, 0.1, 0.3, 1.0)
"""Half decades around what has been best here."""
KFAC_RACER = _kfac("kfac", "K-FAC", "KFAC(model, loss), nothing tuned")
REFERENCE = Racer("adamw-cosine", "AdamW, cosine", ADAPTIVE, _adamw, "cosine")
"""Whom the others are measured by."""
FIELD: tuple[Racer, ...] = (
    KFAC_RACER,
    _kfac("kfac-ekfac", "K-FAC, EKFAC", 'inverse="ekfac"', inverse="ekfac"),
    _kfac("kfac-exact", "K-FAC, exact Fisher", 'fisher="exact"', fisher="exact"),
    Racer("adamw", "AdamW, constant", ADAPTIVE, _adamw),
    REFERENCE,
    Racer("sgd", "SGD, cosine", MOMENTUM_RATES, _sgd, "cosine",
          f"Nesterov momentum {SGD_MOMENTUM}, no weight decay", in_units=True),
    Racer("muon", "Muon, cosine", ORTHOGONAL, _muon, "cosine",
          "in float32, Moonshot's scale; convolutions as matrices; AdamW for embeddings, the last "
          "layer, biases and norms"),
    Racer("soap", "SOAP, cosine", ORTHOGONAL, _soap, "cosine",
          "factors of up to 1024 rows, longer sides keep their basis, bases renewed every 10 steps"),
)  # fmt: skip
"""In the order of the table."""


def racers_named(names: Sequence[str]) -> tuple[Racer, ...]:
    """K-FAC and those named; for none all that do not race on request only.

    Raises:
        ValueError: a name is of no racer.
    """
    known = [racer.name for racer in FIELD]
    for name in names:
        if name not in known:
            raise ValueError(f"--optimizers on networks are of {', '.join(known)}; got {name!r}.")
    if not names:
        return tuple(racer for racer in FIELD if not racer.on_request)
    return tuple(racer for racer in FIELD if racer.name in (*names, KFAC_RACER.name))
