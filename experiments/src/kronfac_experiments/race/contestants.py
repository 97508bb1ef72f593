"""The table of contestants, each with the grid that it is tuned on.

A contestant is a name, a grid and a function that builds its optimizer; one more is one more row.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from kronfac import KFAC, WhitenedMomentum, presets
from kronfac.physics import DenseLevenbergMarquardt
from kronfac_experiments.baseline import NesterovMomentum
from kronfac_experiments.race.peers import SOAP, Muon
from kronfac_experiments.race.problem import Problem
from kronfac_experiments.training import ExponentialBatchSize, ScheduledBatchSampler

Settings = dict[str, float | None]
"""What a run depends on besides problem, contestant and seed: lr, weight_decay, batch, …"""
Grid = dict[str, tuple[float, ...]]
Schedule = Literal["cosine", "linear", "constant"]
WARM_UP = 0.05
"""Share of a run in which the rate rises to its peak."""
LAST_RATE = {"cosine": 0.01, "linear": 0.0}
"""Share of the peak at the end."""
SGD_MOMENTUM = 0.9
PAPER_BATCHES = 1000, 500
"""Mini-batches grow from 1000 examples to all of them in 500 iterations [MG15 §13]."""


@dataclass(frozen=True, eq=False)
class Contestant:
    """A row of the table.

    Args:
        name: On the command line.
        label: In tables.
        build: Makes the optimizer from model, loss, problem and settings.
        grid: Values that are tried, all combinations; empty for one that is not tuned.
        alternative: Other constants than its usual ones, tried at the best point of the grid.
        decays: Whether it has a decoupled weight decay, which the race sets or tunes.
        in_units: Whether its rates are for a loss of the usual size and are divided by a problem's own.
        scheduled: Whether its rate follows the race's schedule.
        curvature: Whether it steps by a quadratic model: no clipping, large mini-batches, and the
            penalty is an argument of its own.
        code: Whose version its runs are kept under.
        sampler: Chooses its own mini-batches; such a run goes by the clock, not by steps.
        runs_of: The contestant that it is with other settings, whose runs and step costs are its own.
        remark: How it is set up, for the page.
    """

    name: str
    label: str
    build: Callable[[nn.Module, nn.Module, Problem, Settings], torch.optim.Optimizer]
    grid: Grid = field(default_factory=dict)
    alternative: Settings = field(default_factory=dict)
    decays: bool = False
    in_units: bool = False
    scheduled: bool = True
    curvature: bool = False
    code: Literal["torch", "kronfac"] = "torch"
    sampler: Callable[[int, Any, int], Any] | None = None
    runs_of: str = ""
    remark: str = ""

    @property
    def recorded_as(self) -> str:
        """The name in records."""
        return self.runs_of or self.name

    def points(self, problem: Problem, weight_decays: Sequence[float]) -> list[Settings]:
        """All settings of the grid, at the contestant's usual mini-batch."""
        grid: dict[str, Sequence[float | None]] = dict(self.grid)
        if self.in_units:
            grid["lr"] = [rate / problem.loss_scale for rate in self.grid["lr"]]
        if self.decays:
            grid["weight_decay"] = weight_decays
        if self.sampler is None:
            grid["batch"] = [problem.batches[-1 if self.curvature else 0]]
        return [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]


def rate(schedule: Schedule, share: float) -> float:
    """The learning rate over its peak after a share of the steps: a linear rise, then down."""
    if schedule == "constant":
        return 1.0
    last = LAST_RATE[schedule]
    if share < WARM_UP:
        return max(share / WARM_UP, 0.01)
    left = 1 - min(1.0, (share - WARM_UP) / (1 - WARM_UP))
    if schedule == "cosine":
        left = (1 - math.cos(math.pi * left)) / 2
    return last + (1 - last) * left


def _number(settings: Settings, name: str, usual: float | None = None) -> float:
    value = settings.get(name, usual)
    assert value is not None
    return value


def _first_order(make: Callable[[nn.Module, Settings], torch.optim.Optimizer]) -> Any:
    return lambda model, loss, problem, settings: make(model, settings)


def _adamw(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        model.parameters(),
        lr=_number(settings, "lr"),
        betas=(0.9, _number(settings, "beta2", 0.999)),
        weight_decay=_number(settings, "weight_decay"),
        fused=True,
    )


def _sgd(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    lr = _number(settings, "lr")
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=SGD_MOMENTUM, nesterov=True)


def _nesterov(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return NesterovMomentum(
        list(model.parameters()), lr=_number(settings, "lr"), mu_max=0.99, weight_decay=0.0
    )


def _muon(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """Its matrices are all weights but embeddings, the last layer's and those of one row."""
    layers = [m for m in model.modules() if isinstance(getattr(m, "weight", None), nn.Parameter)]
    others = {id(m.weight) for m in layers if isinstance(m, nn.Embedding)}
    others.add([id(m.weight) for m in layers if len(m.weight.shape) >= 2][-1])  # type: ignore[arg-type]
    hidden = [p for p in model.parameters() if p.ndim >= 2 and len(p) > 1 and id(p) not in others]
    return Muon(
        model.parameters(),
        hidden,
        lr=_number(settings, "lr"),
        weight_decay=_number(settings, "weight_decay"),
        momentum=_number(settings, "momentum", 0.95),
        beta2=_number(settings, "beta2", 0.999),
    )


def _soap(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return SOAP(
        model.parameters(),
        lr=_number(settings, "lr"),
        weight_decay=_number(settings, "weight_decay"),
        betas=(_number(settings, "momentum", 0.95), 0.95),
    )


def _ours(model: nn.Module, settings: Settings, **options: Any) -> torch.optim.Optimizer:
    return WhitenedMomentum(
        model,
        _number(settings, "lr"),
        weight_decay=_number(settings, "weight_decay"),
        momentum=_number(settings, "momentum", 0.9),
        **options,
    )


def _lbfgs(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(
        model.parameters(),
        history_size=int(_number(settings, "history")),
        line_search_fn="strong_wolfe",
        tolerance_grad=0.0,
        tolerance_change=0.0,
    )


def _kfac(name: str, label: str, remark: str, sampler: Any = None, **options: Any) -> Contestant:
    def build(
        model: nn.Module, loss: nn.Module, problem: Problem, settings: Settings
    ) -> torch.optim.Optimizer:
        return KFAC(model, loss, weight_decay=problem.penalty, **options)

    return Contestant(
        name,
        label,
        build,
        scheduled=False,
        curvature=True,
        code="kronfac",
        sampler=sampler,
        remark=remark,
    )


def _growing(examples: int, optimizer: Any, seed: int) -> ScheduledBatchSampler:
    first, iterations = PAPER_BATCHES
    size = ExponentialBatchSize(min(first, examples), examples, iterations)
    return ScheduledBatchSampler(examples, size, seed=seed)


ADAPTIVE: Grid = {"lr": (1e-3, 3e-3, 1e-2, 3e-2)}
ORTHOGONAL: Grid = {"lr": (3e-3, 1e-2, 3e-2, 1e-1)}
MOMENTUM: Grid = {"lr": (0.03, 0.1, 0.3, 1.0)}
NESTEROV: Grid = {"lr": (0.1, 0.3, 1.0, 3.0)}
DEFAULT: Grid = {"lr": (0.01,), "weight_decay": (0.1,)}
"""Those of `WhitenedMomentum(model)`."""
TABLE = (
    _kfac("kfac", "K-FAC", "KFAC(model, loss), nothing tuned"),
    _kfac(
        "kfac-paper",
        "K-FAC, paper's constants",
        "presets.paper(), mini-batches that grow as in the paper",
        _growing,
        **presets.paper(),
    ),
    _kfac(
        "kfac-paper-tridiagonal",
        "K-FAC, paper, block-tridiagonal",
        'inverse="block_tridiagonal" besides',
        _growing,
        inverse="block_tridiagonal",
        **presets.paper(),
    ),
    Contestant(
        "lm", "Levenberg–Marquardt",
        lambda model, loss, problem, settings: DenseLevenbergMarquardt(model),
        scheduled=False, curvature=True, code="kronfac",
        remark="DenseLevenbergMarquardt(model), residuals only",
    ),
    Contestant(
        "ours-untuned", "WhitenedMomentum (untuned)", _first_order(_ours), DEFAULT, code="kronfac",
        runs_of="ours", remark="WhitenedMomentum(model)",
    ),
    Contestant(
        "ours", "WhitenedMomentum", _first_order(_ours), ORTHOGONAL, {"momentum": 0.95}, decays=True,
        code="kronfac", remark="WhitenedMomentum(model, lr, weight_decay=…)",
    ),
    Contestant(
        "ours-without-a", "WhitenedMomentum without A", _first_order(partial(_ours, inputs=None)),
        ORTHOGONAL, {"momentum": 0.95}, decays=True, code="kronfac",
        remark="WhitenedMomentum(model, lr, weight_decay=…, inputs=None)",
    ),
    Contestant(
        "adamw", "AdamW", _first_order(_adamw), ADAPTIVE, {"beta2": 0.95}, decays=True,
        remark="fused",
    ),
    Contestant(
        "sgd", "SGD", _first_order(_sgd), MOMENTUM, in_units=True,
        remark=f"Nesterov momentum {SGD_MOMENTUM}",
    ),
    Contestant(
        "nag", "Nesterov momentum", _first_order(_nesterov), NESTEROV, in_units=True,
        remark="μ rises to 0.99 as in the paper",
    ),
    Contestant(
        "muon", "Muon", _first_order(_muon), ORTHOGONAL, {"momentum": 0.9, "beta2": 0.95}, decays=True,
        remark="in float32, Moonshot's scale, convolutions as matrices (out, rest); fused AdamW for "
        "embeddings, the last layer, biases and norms",
    ),
    Contestant(
        "soap", "SOAP", _first_order(_soap), ORTHOGONAL, {"momentum": 0.9}, decays=True,
        remark="factors of up to 1024 rows, bases renewed every 10 steps",
    ),
    Contestant(
        "lbfgs", "L-BFGS", _first_order(_lbfgs), {"history": (5, 20, 50, 100)},
        scheduled=False,
        remark="strong Wolfe line search, 20 iterations a step",
    ),
)  # fmt: skip
CONTESTANTS = {contestant.name: contestant for contestant in TABLE}


def contestants_named(names: Sequence[str]) -> tuple[Contestant, ...]:
    """The contestants of these names, in the order of the table.

    Raises:
        ValueError: there is no such contestant.
    """
    for name in names:
        if name not in CONTESTANTS:
            raise ValueError(f"--contestants are of {', '.join(CONTESTANTS)}; got {name!r}.")
    return tuple(contestant for contestant in TABLE if contestant.name in names)
