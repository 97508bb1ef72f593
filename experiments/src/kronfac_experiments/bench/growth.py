"""`kronfac bench growth`: how a step grows with width, depth, sequence length and image size.

Of a transformer and a residual network one size is swept at a time around a base. CPU time of interleaved
steps of SGD and K-FAC, operations as `torch.utils.flop_counter` has them, and memory beside the plan's.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kronfac import KFAC
from kronfac_experiments.bench.growing import Size, examples, network
from kronfac_experiments.bench.growth_page import SWEEPS, GrowthTrial, picture, tables
from kronfac_experiments.bench.part_memory import part_memory
from kronfac_experiments.bench.trials import Advance, run_trials
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, described
from kronfac_experiments.pages.publish import publish
from kronfac_experiments.plain_steps import GradientSteps, KfacSteps, Steps


@dataclass(frozen=True)
class GrowthConfig(BenchOptions):
    """How time and memory of a K-FAC step grow on transformers and residual networks, in CPU time."""

    threads: int = 1
    """CPU threads."""
    widths: tuple[int, ...] = (32, 64, 128, 256)
    """Numbers of a token; channels are a quarter of them."""
    depths: tuple[int, ...] = (1, 2, 4, 8)
    """Blocks."""
    extents: tuple[int, ...] = (32, 64, 128, 256)
    """Tokens; pixels of a side are a quarter of them."""
    base: tuple[int, int, int] = (64, 2, 64)
    """Width, depth and extent while another is swept."""
    batch: int = 32
    """Sequences or images of a mini-batch."""
    warm_up: int = 22
    """Steps before: λ settles in the first twenty, with a measurement of ρ in each."""
    repeats: int = 3
    """Repeats; their median, smallest and largest are shown."""
    steps: int = 5
    """Steps in a repeat."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("widths", "depths", "extents", "base", "batch", "warm_up", "repeats", "steps"):
            at_least(1, **{name: getattr(self, name)})

    def sweeps(self) -> dict[str, list[tuple[int, Size]]]:
        """The sizes of every sweep."""
        found = {}
        values = {"width": self.widths, "depth": self.depths, "extent": self.extents}
        for name, (kind, field) in SWEEPS.items():
            part = 1 if kind == "transformer" else 4
            width, depth, extent = self.base
            size = Size(kind, width // part, depth, extent // part, self.batch)
            scale = 1 if field == "depth" else part
            own = [value // scale for value in values[field]]
            changes: list[dict[str, Any]] = [{field: value} for value in own]
            every = [replace(size, **change) for change in changes]
            found[name] = list(zip(own, every, strict=True))
        return found


def growth_command(config: GrowthConfig) -> list[Path]:
    """Measure what has not been measured; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    settings = config.settings("widths", "depths", "extents", "base")
    path = config.folder("growth") / "growth.json"
    sweeps = config.sweeps()
    jobs: dict[str, Callable[[Advance], GrowthTrial]] = {
        str(size): partial(_measure, config, size) for own in sweeps.values() for _, size in own
    }
    trials = {t.name: t for t in run_trials(path, settings, GrowthTrial, jobs, console)}
    document = Document(
        title="How a step grows on transformers and residual networks",
        command=command_line("bench growth", config),
        settings=described(
            config.threads,
            config.seed,
            f"mini-batches of {config.batch}",
            f"{config.repeats} × {config.steps} interleaved steps after {config.warm_up}",
        ),
        tables=tables(sweeps, trials),
        picture=picture(sweeps, trials),
    )
    return publish(document, path, config.output, console)


def _cpu_seconds(steps: Steps, x: torch.Tensor, y: torch.Tensor) -> float:
    start = time.process_time()
    steps.step(x, y)
    return time.process_time() - start


def _measure(config: GrowthConfig, size: Size, advance: Advance) -> GrowthTrial:
    memory = part_memory(size, config.threads, config.seed)
    advance(0.3)
    x, y = examples(size, config.seed)
    model, loss = network(size, config.seed), nn.CrossEntropyLoss()
    kfac = KfacSteps(KFAC(network(size, config.seed), loss))
    sgd = GradientSteps(model, loss, torch.optim.SGD(model.parameters(), lr=1e-4))
    for _ in range(config.warm_up):
        sgd.step(x, y)
        kfac.step(x, y)
    seconds = [
        [(_cpu_seconds(sgd, x, y), _cpu_seconds(kfac, x, y)) for _ in range(config.steps)]
        for _ in range(config.repeats)
    ]
    with FlopCounterMode(display=False) as plain:
        sgd.step(x, y)
    with FlopCounterMode(display=False) as counted:
        for _ in range(config.steps):
            kfac.step(x, y)
    advance(0.7)
    return GrowthTrial(
        name=str(size),
        sgd=median(mean(a for a, _ in repeat) for repeat in seconds),
        kfac=[mean(b for _, b in repeat) for repeat in seconds],
        ratios=[mean(b for _, b in repeat) / mean(a for a, _ in repeat) for repeat in seconds],
        sgd_operations=plain.get_total_flops(),
        operations=counted.get_total_flops() / config.steps,
        measured=memory.measured,
        planned=memory.planned,
    )
