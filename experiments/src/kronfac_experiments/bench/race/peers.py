"""Who races: K-FAC as it comes, and its peers with the grids that they are tuned on, six points each.

A peer is a name, a grid and a function that builds it. Packages that are not installed are no error: the
peer is listed with the command that installs it.
"""

import importlib
import importlib.util
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from kronfac.objective import Likelihood
from kronfac_experiments.baseline import NesterovMomentum
from kronfac_experiments.bench.race.muon import Muon
from kronfac_experiments.config import TrainConfig
from kronfac_experiments.optimizers import (
    ClosureStepper,
    Stepper,
    StepperMaker,
    make_stepper,
)
from kronfac_experiments.progress import number

Point = dict[str, float]
"""A point of a grid, by the names of what is chosen."""
Builder = Callable[[nn.Module, Point, float], torch.optim.Optimizer]
"""From the model, a point and η."""


@dataclass(frozen=True)
class Package:
    """What has to be installed for a peer: modules, as pip knows them, and under which licence."""

    modules: tuple[str, ...]
    requirements: tuple[str, ...]
    licence: str


@dataclass(frozen=True)
class Peer:
    """One of the field.

    Args:
        name: On the command line.
        label: In tables.
        grid: What is tried; a single point for an optimizer that is not tuned.
        build: None for K-FAC, and for what runs in a process of its own.
        package: None for what comes with torch.
        closure_decay: Whether the term η/2 ‖θ‖² has to come from the closure.
        remark: How it is set up, if that is not its own default.
    """

    name: str
    label: str
    grid: tuple[Point, ...]
    build: Builder | None = None
    package: Package | None = None
    closure_decay: bool = False
    remark: str = ""

    @property
    def missing(self) -> str:
        """How to install what it needs; empty if it is there."""
        if self.package is None or all(map(importlib.util.find_spec, self.package.modules)):
            return ""
        return f"pip install {shlex.join(self.package.requirements)}"

    def maker(self, point: Point) -> StepperMaker:
        """Makes its steps at a point of the grid."""
        build = self.build
        if build is None:
            return make_stepper

        def make(config: TrainConfig, model: nn.Module, loss: Likelihood) -> Stepper:
            eta = config.weight_decay or 0.0
            optimizer = build(model, point, 0.0 if self.closure_decay else eta)
            decay = eta if self.closure_decay else 0.0
            return ClosureStepper(self.label, optimizer, model, loss, decay)

        return make


def in_words(point: Point) -> str:
    """Names and numbers; the ends of a grid are told apart by `on_the_edge`."""
    words = []
    for name, value in point.items():
        plain = f"{name.replace('_', ' ')} {number(value)}"
        words.append(NAMED_BATCHES.get(value, plain) if name == "batch" else plain)
    return ", ".join(words)


def on_the_edge(peer: Peer, point: Point) -> bool:
    """Whether a number of the point is the least or most of three or more: a better one may lie beyond."""
    for name, value in point.items():
        tried = {other[name] for other in peer.grid}
        if len(tried) > 2 and value in (min(tried), max(tried)):
            return True
    return False


def _rates(*rates: float) -> tuple[Point, ...]:
    return tuple({"lr": rate} for rate in rates)


GROWING = 0.0
"""As a mini-batch: from 1000 cases to all of them in 500 iterations [MG15 §13]."""
BY_NOISE = -1.0
"""As a mini-batch: kronfac's `AdaptiveBatchSampler`, for its own K-FAC alone."""
NAMED_BATCHES = {GROWING: "growing mini-batches", BY_NOISE: "adaptive mini-batches"}
ADAPTIVE = _rates(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Half decades around what these optimizers have as default, 1e-3 or 3e-3."""
ORTHOGONAL = _rates(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
GRAFTED = _rates(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
"""SGD's step lengths, momentum 0.9."""
NESTEROV = (
    *({"lr": lr, "mu_max": 0.99} for lr in (0.001, 0.003, 0.01, 0.03, 0.1)),
    {"lr": 0.01, "mu_max": 0.999},
)
"""Mostly learning rates: between 0.9 and 0.995, μ_max changes the error on MNIST by 6 %, the learning
rate by factors (docs/results/tuning.md)."""
QUASI_NEWTON = tuple(
    {"batch": batch, "max_iter": iterations}
    for batch in (1000, 5000, 10_000)
    for iterations in (4.0, 10.0)
)
"""With a line search there is no learning rate to choose; how noisy the function may be, and for how
long it stays the same, there is. More of either, and a step would take longer than a point's budget."""
LAMBDA0_AND_BATCH = tuple(
    {"lambda0": damping, "batch": batch} for damping in (0.01, 0.1, 1.0) for batch in (500, GROWING)
)
"""λ₀ and mini-batches: of the same size as the others', or growing as in the paper. Of
0.1, 3 and 100, an earlier grid, 0.1 won on MNIST."""
SINGD_RATES = _rates(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)


def _nesterov(model: nn.Module, point: Point, eta: float) -> torch.optim.Optimizer:
    return NesterovMomentum(model.parameters(), weight_decay=eta, **point)


def _adamw(model: nn.Module, point: Point, eta: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=point["lr"], weight_decay=eta)


def _lbfgs(model: nn.Module, point: Point, eta: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        model.parameters(), max_iter=int(point["max_iter"]), line_search_fn="strong_wolfe"
    )


def _muon(model: nn.Module, point: Point, eta: float) -> torch.optim.Optimizer:
    return Muon(model.parameters(), lr=point["lr"], weight_decay=eta)


def _collection(name: str, **settings: Any) -> Builder:
    """A class of pytorch-optimizer."""

    def build(model: nn.Module, point: Point, eta: float) -> torch.optim.Optimizer:
        kind = getattr(importlib.import_module("pytorch_optimizer"), name)
        made: torch.optim.Optimizer = kind(
            model.parameters(), lr=point["lr"], weight_decay=eta, **settings
        )
        return made

    return build


class _WithoutClosure(torch.optim.Optimizer):
    """Calls the closure for an optimizer that refuses one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self._inner = inner

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        returned = None if closure is None else closure()
        self._inner.step()
        return returned


def _singd(model: nn.Module, point: Point, eta: float) -> torch.optim.Optimizer:
    kind = importlib.import_module("singd.optim.optimizer").SINGD
    return _WithoutClosure(kind(model, lr=point["lr"], weight_decay=eta, normalize_lr_cov=True))


SHAMPOO_EVERY = 20
"""Steps between two inverse roots, which take seconds on the MNIST autoencoder; the package has 1000."""
COLLECTION = Package(("pytorch_optimizer",), ("pytorch-optimizer==4.1.0",), "Apache-2.0")
WITH_EINSUM = Package(
    ("pytorch_optimizer", "opt_einsum"),
    ("pytorch-optimizer==4.1.0", "opt-einsum==3.4.0"),
    "Apache-2.0, MIT",
)
"""PSGD's products of many factors: torch alone multiplies them from left to right, which takes 390 GB on
CURVES."""
SINGD = Package(("singd",), ("singd==0.0.5",), "MIT")
KFAC = Peer(
    "kfac",
    "K-FAC",
    ({"batch": BY_NOISE},),
    remark="kronfac's defaults and its adaptive mini-batches, nothing tuned",
)
KFAC_FIXED = Peer(
    "kfac-fixed", "K-FAC, fixed mini-batches", ({},), remark="as above, mini-batches as its peers'"
)
KFAC_JAX = Peer(
    "kfac-jax",
    "kfac-jax",
    LAMBDA0_AND_BATCH,
    remark="version 0.0.8 (Apache-2.0); adaptive learning rate, momentum and damping; compiling is "
    "not counted",
)
FIELD: tuple[Peer, ...] = (
    KFAC,
    KFAC_FIXED,
    Peer("nag", "Nesterov momentum", NESTEROV, _nesterov, remark="μ rises as in the paper"),
    Peer("adamw", "AdamW", ADAPTIVE, _adamw),
    Peer("lbfgs", "L-BFGS", QUASI_NEWTON, _lbfgs, closure_decay=True,
         remark="strong Wolfe line search; its cases count once for the passes of a step"),
    Peer("muon", "Muon", ORTHOGONAL, _muon,
         remark="in float32, biases by AdamW, Moonshot's scale"),
    Peer("soap", "SOAP", ADAPTIVE, _collection("SOAP"), COLLECTION),
    Peer("shampoo", "Shampoo", GRAFTED,
         _collection("ScalableShampoo", start_preconditioning_step=SHAMPOO_EVERY,
                     preconditioning_compute_steps=SHAMPOO_EVERY),
         COLLECTION, remark=f"grafted to SGD, inverse roots every {SHAMPOO_EVERY} steps"),
    Peer("psgd", "PSGD-Kron", ADAPTIVE, _collection("Kron"), WITH_EINSUM),
    Peer("singd", "SINGD", SINGD_RATES, _singd, SINGD,
         remark="dense factors, normalised step of the factors"),
    KFAC_JAX,
)  # fmt: skip
"""In the order of the table."""


def peers_named(names: Sequence[str]) -> tuple[Peer, ...]:
    """K-FAC and those named; all for none.

    Raises:
        ValueError: a name is of no peer.
    """
    known = [peer.name for peer in FIELD]
    for name in names:
        if name not in known:
            raise ValueError(f"--optimizers are of {', '.join(known)}; got {name!r}.")
    return tuple(peer for peer in FIELD if not names or peer.name in (*names, KFAC.name))
