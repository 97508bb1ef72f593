"""`kronfac bench network-step`: what a K-FAC step costs on networks that are no perceptrons.

Every repeat takes steps of `torch.optim.SGD` and of K-FAC in turn on the same mini-batches. Times are of
the process's own CPU, so that other programs do not count; operations are those of products of matrices,
convolutions and attention, as `torch.utils.flop_counter` counts them.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kronfac import KFAC
from kronfac_experiments.bench.race.networks.problems import NETWORKS, NetworkProblem
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, Table, described
from kronfac_experiments.pages.publish import publish
from kronfac_experiments.plain_steps import GradientSteps, KfacSteps, Steps

Name = Literal["cnn", "resnet", "conv_autoencoder", "gpt", "lstm", "tabular"]
COUNTED = 5
"""Steps of K-FAC whose operations are counted: ρ is measured in one of them."""
FUSED = {"lstm"}
"""Networks with kernels whose operations torch does not count."""
PARTS = ("gradient", "statistics", "fisher_products", "reduction_ratio", "inverse")


@dataclass(frozen=True)
class NetworkStepConfig(BenchOptions):
    """What a K-FAC step costs on the race's networks, in steps of SGD: measured, and in operations."""

    threads: int = 1
    """CPU threads."""
    networks: tuple[Name, ...] = ("cnn", "resnet", "conv_autoencoder", "gpt", "lstm", "tabular")
    """Networks of `kronfac bench race`."""
    warm_up: int = 22
    """Steps before: λ settles in the first twenty, with a measurement of ρ in each."""
    repeats: int = 3
    """Repeats; their median, smallest and largest are shown."""
    steps: int = 10
    """Steps in a repeat."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, repeats=self.repeats, steps=self.steps, warm_up=self.warm_up)
        if not self.networks:
            raise ValueError("--networks needs one or more.")


@dataclass(frozen=True)
class NetworkStepTrial:
    """Steps of SGD and K-FAC on one network."""

    name: str
    batch: int
    first: float
    """CPU seconds of K-FAC's first step, in which it tries out the model."""
    sgd: list[float]
    """Mean CPU seconds of a step, a repeat each."""
    kfac: list[float]
    parts: dict[str, float]
    """Seconds of K-FAC's parts, as shares of their sum."""
    sgd_operations: int
    operations: float

    @property
    def ratios(self) -> list[float]:
        """K-FAC over SGD, repeat by repeat."""
        return [a / b for a, b in zip(self.kfac, self.sgd, strict=True)]

    @property
    def counted(self) -> float:
        """The same in operations."""
        return self.operations / self.sgd_operations


def network_step_command(config: NetworkStepConfig) -> list[Path]:
    """Measure what has not been measured; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    settings = asdict(config)
    for name in ("run_dir", "output", "networks"):
        del settings[name]
    path = config.folder("network-step") / "network_step.json"
    jobs: dict[str, Callable[[Advance], NetworkStepTrial]] = {
        name: partial(_measure, config, NETWORKS[name]) for name in config.networks
    }
    trials = run_trials(path, settings, NetworkStepTrial, jobs, console)
    return publish(_document(config, trials), path, config.output, console)


def _batches(problem: NetworkProblem, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    cases, generator = problem.split.train, torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(cases), (problem.kfac_batch,), generator=generator)
        yield cases.inputs[rows], cases.targets[rows]


def _seconds(steps: Steps, x: Tensor, y: Tensor) -> float:
    start = time.process_time()
    steps.step(x, y)
    return time.process_time() - start


def _measure(
    config: NetworkStepConfig, problem: NetworkProblem, advance: Advance
) -> NetworkStepTrial:
    optimizer = KFAC(problem.make_model(config.seed), problem.loss())
    model = problem.make_model(config.seed)
    kfac = KfacSteps(optimizer)
    sgd = GradientSteps(model, problem.loss(), torch.optim.SGD(model.parameters(), lr=1e-3))
    batches = _batches(problem, config.seed)
    total = config.warm_up + config.repeats * config.steps
    parts: dict[str, float] = defaultdict(float)

    def run(count: int) -> tuple[list[float], list[float]]:
        found: tuple[list[float], list[float]] = [], []
        for _ in range(count):
            x, y = next(batches)
            found[0].append(_seconds(sgd, x, y))
            found[1].append(_seconds(kfac, x, y))
            assert optimizer.report is not None
            for part, spent in optimizer.report.seconds.items():
                parts[part] += spent
            advance(1 / total)
        return found

    first = run(config.warm_up)[1][0]
    parts.clear()
    repeats = [run(config.steps) for _ in range(config.repeats)]
    everything = sum(parts.values())
    x, y = next(batches)
    with FlopCounterMode(display=False) as plain:
        sgd.step(x, y)
    with FlopCounterMode(display=False) as counted:
        for _ in range(COUNTED):
            kfac.step(*next(batches))
    return NetworkStepTrial(
        name=problem.name,
        batch=problem.kfac_batch,
        first=first,
        sgd=[mean(a) for a, _ in repeats],
        kfac=[mean(b) for _, b in repeats],
        parts={part: spent / everything for part, spent in parts.items()},
        sgd_operations=plain.get_total_flops(),
        operations=counted.get_total_flops() / COUNTED,
    )


def _document(config: NetworkStepConfig, trials: list[NetworkStepTrial]) -> Document:
    rows, shares = [], []
    for trial in trials:
        ratio = median(trial.ratios)
        rows.append(
            (
                trial.name,
                f"{trial.batch}",
                f"{ratio:.2f}",
                f"{min(trial.ratios):.2f} – {max(trial.ratios):.2f}",
                "–" if trial.name in FUSED else f"{trial.counted:.2f}",
                f"{1e3 * median(trial.kfac):.0f}",
                f"{1e3 * median(trial.sgd):.0f}",
                f"{trial.first:.1f}",
            )
        )
        rest = 1 - sum(trial.parts.get(part, 0.0) for part in PARTS)
        each = [trial.parts.get(part, 0.0) for part in PARTS] + [rest]
        shares.append((trial.name, *(f"{ratio * share:.2f}" for share in each)))
    columns = (
        "", "m", "K-FAC / SGD, median", "smallest – largest", "in operations", "K-FAC, ms", "SGD, ms",
        "first step, s",
    )  # fmt: skip
    note = (
        "CPU time of the process; K-FAC's defaults, KFAC.closure in one chunk. Operations are those of "
        "products, convolutions and attention in five steps; torch does not count those of its fused LSTM."
    )
    return Document(
        title="Steps of networks that are no perceptrons",
        command=command_line("bench network-step", config),
        settings=described(
            config.threads,
            config.seed,
            f"{config.repeats} × {config.steps} interleaved steps after {config.warm_up}",
        ),
        tables=(
            Table("A step of K-FAC in steps of SGD", columns, rows, note),
            Table(
                "Where it goes, in steps of SGD",
                ("", *(part.replace("_", " ") for part in PARTS), "others"),
                shares,
                "Shares of `StepReport.seconds`.",
            ),
        ),
        plots=(),
    )
