"""What `kronfac train` is told, typed and checked."""

import math
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from kronfac_experiments.options import at_least, hint, require

PROBLEMS = ("curves", "mnist", "faces", "mnist16")
TORCH_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {
    name.lower(): item
    for name, item in vars(torch.optim).items()
    if isinstance(item, type)
    and issubclass(item, torch.optim.Optimizer)
    and item is not torch.optim.Optimizer
}
"""Every optimizer of `torch.optim`, by its name in lower case."""
DEFAULT_BATCH = 500
NAG_BATCH = {"curves": 250}
"""The paper's mini-batches for the baseline; 500 elsewhere [MG15 §13]."""
DEFAULT_ITERATIONS = 500
AVERAGING_STARTS = 200
"""Iteration of the first average in the authors' program."""


_BATCHES = "adaptive for kfac, paper with --preset paper; 250 for nag on curves, else 500"


@dataclass(frozen=True)
class KfacOptions:
    """Options of `--optimizer kfac`."""

    inverse: Literal["block_diagonal", "block_tridiagonal", "ekfac"] = "block_diagonal"
    """Approximate inverse Fisher."""
    preset: Literal["default", "paper"] = "default"
    """Constants of kronfac, or of the paper's experiments."""
    lambda0: Annotated[
        float | None, hint("FLOAT", "found on the first mini-batch, or 150 with paper")
    ] = None
    """First λ, in units of the objective's curvature."""
    momentum: bool = True
    """Whether the previous update is the second direction of the quadratic model."""
    cg_steps: int = 1
    """Steps of preconditioned CG on the quadratic model; more than 1 is Hessian-free optimisation."""
    statistics_fraction: Annotated[
        float | None, hint("FLOAT", "1/8; 250 rows at least but with paper")
    ] = None
    """τ₁, share of the mini-batch for the statistics, in (0, 1]."""
    fisher_fraction: Annotated[
        float | None, hint("FLOAT", "1/4; 250 rows at least but with paper")
    ] = None
    """τ₂, share of the mini-batch for the exact-Fisher products, in (0, 1]."""


@dataclass(frozen=True)
class FirstOrderOptions:
    """Options of the other optimizers."""

    lr: Annotated[float | None, hint("FLOAT", "0.01 for nag, else torch.optim's own")] = None
    """Learning rate."""
    mu_max: Annotated[float | None, hint("FLOAT", "0.99")] = None
    """Ceiling of nag's momentum, in [0, 1)."""


@dataclass(frozen=True)
class Limits:
    """When to stop: at the first of those that are given."""

    iterations: Annotated[int | None, hint("INT", "500 if no limit is given")] = None
    """Number of iterations."""
    seconds: Annotated[float | None, hint("FLOAT", "no limit")] = None
    """Seconds of optimiser time; evaluating, logging and saving are not counted."""
    until_error: Annotated[float | None, hint("FLOAT", "no limit")] = None
    """Training error to reach, of the current or the averaged parameters, where evaluated."""

    def __post_init__(self) -> None:
        at_least(1, iterations=self.iterations)
        for name in ("seconds", "until_error"):
            value = getattr(self, name)
            require(value is None or 0 <= value < math.inf, name, "finite, 0 or more", value)

    @property
    def given(self) -> bool:
        """Whether there is any."""
        return any(value is not None for value in asdict(self).values())


@dataclass(frozen=True)
class Recording:
    """What is measured and written on the way."""

    evaluate_every: int = 50
    """Iterations between evaluations after the 100th, every 10 before; 0: only first and last."""
    evaluation_cases: Annotated[int | None, hint("INT", "all")] = None
    """Training cases for the training error and test cases for the test error, the first ones."""
    checkpoint_every: float = 60.0
    """Seconds of optimiser time between checkpoints; 0: after every iteration."""

    def __post_init__(self) -> None:
        at_least(0, evaluate_every=self.evaluate_every, checkpoint_every=self.checkpoint_every)
        at_least(1, evaluation_cases=self.evaluation_cases)


@dataclass(frozen=True)
class TrainConfig:
    """Train a network of the paper, or an autoencoder of your own data.

    PROBLEM is curves (generated, no download), mnist or faces, the deep autoencoders of section 13,
    or mnist16, the classifier of section 3. Errors are squared errors a case, summed over pixels, and per
    cent of cases misclassified for mnist16.

    Cases of --data that all lie in [0, 1] get a cross-entropy loss, others a squared error. An array
    'test' (n', d) in the file holds the test cases; without it a sixth of the cases is held out.
    """

    problem: Annotated[
        str | None, tyro.conf.Positional, hint("PROBLEM", "none, for --data or --resume")
    ] = None
    """curves, mnist, faces or mnist16."""
    data: Annotated[Path | None, hint("FILE.npz", "none")] = None
    """Your own cases, for an autoencoder: array 'cases' (n, d), or the file's first array."""
    layers: Annotated[str | None, hint("WIDTHS", "none")] = None
    """With --data: widths of the encoder, such as 784,100,30; the decoder mirrors it."""
    optimizer: str = "kfac"
    """kfac, nag (Nesterov momentum with a rising μ), or a class of torch.optim by name."""
    batch: Annotated[
        int | Literal["adaptive", "paper"] | None, hint("INT|adaptive|paper", _BATCHES)
    ] = None
    """Cases in a mini-batch; adaptive: from 500 on, growing if noise holds training up; paper: from
    1000 to all of them in 500 iterations."""
    limits: tyro.conf.OmitArgPrefixes[Limits] = field(default_factory=Limits)
    kfac: tyro.conf.OmitArgPrefixes[KfacOptions] = field(default_factory=KfacOptions)
    first_order: tyro.conf.OmitArgPrefixes[FirstOrderOptions] = field(
        default_factory=FirstOrderOptions
    )
    weight_decay: Annotated[float | None, hint("FLOAT", "the problem's; 1e-5 for --data")] = None
    """η of the term η/2 ‖θ‖², biases included; AdamW and its like decay in their own way."""
    average: Annotated[int | None, hint("INT", "200 for nag and --preset paper, else 0")] = None
    """Iteration at which averaging of the iterates starts, decay 0.99; 0: no averaging."""
    seed: int = 0
    """Seed of initial parameters, mini-batches and sampled targets."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/PROBLEM-OPTIMIZER-seedS")] = None
    """Folder to write, which must not exist yet."""
    resume: Annotated[Path | None, hint("DIR", "none")] = None
    """Continue the run in this folder as it was; only limits and --checkpoint-every may change."""
    recording: tyro.conf.OmitArgPrefixes[Recording] = field(default_factory=Recording)
    device: str = "cpu"
    """cpu, cuda, cuda:1, mps, …"""
    threads: int = 2
    """CPU threads."""
    dtype: Literal["float32", "float64"] = "float32"
    """Precision of parameters and data."""

    def __post_init__(self) -> None:
        self._check_source()
        name = self.optimizer.lower()
        if name not in ("kfac", "nag", *TORCH_OPTIMIZERS):
            raise ValueError(
                f"--optimizer is kfac, nag or one of {', '.join(TORCH_OPTIMIZERS)}; "
                f"got {self.optimizer!r}."
            )
        if self.resume is None:  # else compared with the saved run as a whole
            self._refuse_what_would_be_ignored(name)
        named = self.batch in ("adaptive", "paper")
        at_least(1, batch=None if named else self.batch, threads=self.threads)
        at_least(0, average=self.average, seed=self.seed)

    def _refuse_what_would_be_ignored(self, optimizer: str) -> None:
        if optimizer == "kfac":
            why = "not for kfac, which has nothing to tune"
            _refuse(optimizer, self.first_order, FirstOrderOptions(), why)
        else:
            _refuse(optimizer, self.kfac, KfacOptions(), "for kfac only")
            adaptive = self.batch == "adaptive"
            require(not adaptive, "batch", "a number or paper but for kfac", self.batch)
        if optimizer not in ("kfac", "nag"):
            mu_max = self.first_order.mu_max
            require(mu_max is None, "mu_max", "for nag alone", mu_max)

    def _check_source(self) -> None:
        if self.problem is not None and self.problem not in PROBLEMS:
            raise ValueError(
                f"PROBLEM is one of {', '.join(PROBLEMS)}, or --data FILE.npz; got {self.problem!r}."
            )
        if (self.problem is None) == (self.data is None) and (self.resume is None or self.data):
            raise ValueError(
                f"Name one PROBLEM ({', '.join(PROBLEMS)}), or give --data FILE.npz, or --resume DIR."
            )
        if self.data is not None and self.layers is None:
            raise ValueError("--data needs --layers, the encoder's widths, such as 784,100,30.")
        if self.layers is not None and self.data is None and self.resume is None:
            raise ValueError("--layers goes with --data; the problems have their own layers.")
        if self.layers is not None:
            self.encoder  # noqa: B018 - reading it checks it

    @property
    def encoder(self) -> tuple[int, ...]:
        """The widths that `layers` names."""
        widths = [part.strip() for part in (self.layers or "").split(",")]
        if len(widths) < 2 or not all(w.isdecimal() and int(w) > 0 for w in widths):
            raise ValueError(
                "--layers is two or more positive widths with commas, such as 784,100,30; "
                f"got {self.layers!r}."
            )
        return tuple(int(width) for width in widths)

    @property
    def name(self) -> str:
        """Name of what is trained."""
        return self.problem or (self.data.stem if self.data else "run")

    @property
    def folder(self) -> Path:
        """Where the run is written."""
        default = Path("runs") / f"{self.name}-{self.optimizer.lower()}-seed{self.seed}"
        return self.resume or self.run_dir or default


GROUPS: dict[str, type] = {
    "limits": Limits,
    "kfac": KfacOptions,
    "first_order": FirstOrderOptions,
    "recording": Recording,
}
"""Fields of a configuration that are configurations themselves."""


def _refuse(optimizer: str, given: object, defaults: object, why: str) -> None:
    """Options that would be ignored."""
    changed = [
        "--" + f.name.replace("_", "-")
        for f in fields(given)  # type: ignore[arg-type]
        if getattr(given, f.name) != getattr(defaults, f.name)
    ]
    if changed:
        raise ValueError(f"{', '.join(changed)}: {why}; --optimizer is {optimizer}.")


def resolved(config: TrainConfig, *, cases: int, weight_decay: float) -> TrainConfig:
    """The configuration with every open default decided; deciding twice changes nothing.

    Args:
        config: As given.
        cases: Number of training cases.
        weight_decay: The problem's η.
    """
    name = config.optimizer.lower()
    paper = config.kfac.preset == "paper"
    kfac, first_order, limits = config.kfac, config.first_order, config.limits
    if name == "kfac" and paper:
        kfac = replace(
            kfac,
            lambda0=_or(kfac.lambda0, 150.0),
            statistics_fraction=_or(kfac.statistics_fraction, 1 / 8),
            fisher_fraction=_or(kfac.fisher_fraction, 1 / 4),
        )
    if name == "nag":
        first_order = FirstOrderOptions(_or(first_order.lr, 0.01), _or(first_order.mu_max, 0.99))
    size = NAG_BATCH.get(config.name, DEFAULT_BATCH) if name == "nag" else DEFAULT_BATCH
    batch: int | Literal["adaptive", "paper"] = min(size, cases)
    if name == "kfac":
        batch = "paper" if paper else "adaptive"
    averages = name == "nag" or (name == "kfac" and paper)
    return replace(
        config,
        optimizer=name,
        kfac=kfac,
        first_order=first_order,
        limits=limits if limits.given else Limits(iterations=DEFAULT_ITERATIONS),
        batch=_or(config.batch, batch),
        average=_or(config.average, AVERAGING_STARTS if averages else 0),
        weight_decay=_or(config.weight_decay, weight_decay),
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
