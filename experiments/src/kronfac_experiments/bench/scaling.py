"""`kronfac bench scaling`: time and memory of a step by width, depth, batch and outputs [MG15 §8].

One is swept at a time around a base network. A wide network takes minutes for twenty steps, so an average
step is put together from its parts: the first steps refresh the inverse, the fifth measures ρ, and how
often each part is done is known.
"""

import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
from rich.console import Console

from kronfac import Categorical
from kronfac.settings import FIRST_REFRESHES
from kronfac_experiments.bench import operations
from kronfac_experiments.bench.chain import Inverse, Sizes, cases, network
from kronfac_experiments.bench.paired_steps import PairedSteps
from kronfac_experiments.bench.peak_memory import available, measured, theory
from kronfac_experiments.bench.scaling_tables import Point, ScalingTrial, plots, tables
from kronfac_experiments.bench.schedule import Preset, Schedule, arguments, in_words
from kronfac_experiments.bench.trials import Advance, LeftOutError, run_trials
from kronfac_experiments.config import hint
from kronfac_experiments.options import BenchOptions, at_least, command_line
from kronfac_experiments.pages.document import Document, described
from kronfac_experiments.pages.publish import publish

GB = 1e9


@dataclass(frozen=True)
class Plan:
    """What is swept around what."""

    base: Sizes
    sweeps: dict[str, tuple[int, ...]]
    seconds: float


FULL = Plan(
    base=Sizes(width=512, depth=4, batch=1000, outputs=10),
    sweeps={
        "width": (256, 512, 1024, 2048, 4096),
        "depth": (4, 8, 16, 32),
        "batch": (250, 1000, 5000, 20_000),
        "outputs": (10, 100, 1000, 10_000),
    },
    seconds=120.0,
)
QUICK = Plan(
    base=Sizes(width=256, depth=4, batch=500, outputs=10),
    sweeps={
        "width": (128, 256, 512, 1024),
        "depth": (2, 4, 8, 16),
        "batch": (250, 1000, 4000),
        "outputs": (10, 100, 1000),
    },
    seconds=5.0,
)


def _hint(name: str) -> object:
    """How a sweep that may be left open shows in `--help`."""
    full, quick = (" ".join(map(str, plan.sweeps[name])) for plan in (FULL, QUICK))
    return hint("INT ...", f"{full}; {quick} with --quick")


@dataclass(frozen=True)
class ScalingConfig(BenchOptions):
    """How time and memory of a step grow with width, depth, batch and outputs, one at a time.

    Tanh networks with a softmax, random cases. A size that would not fit into the memory is left out.
    """

    quick: bool = False
    """Smaller networks and less time for each: minutes, not an hour."""
    widths: Annotated[tuple[int, ...], _hint("width")] = ()
    """Widths of inputs and hidden layers."""
    depths: Annotated[tuple[int, ...], _hint("depth")] = ()
    """Layers with weights."""
    batches: Annotated[tuple[int, ...], _hint("batch")] = ()
    """Cases in a mini-batch."""
    outputs: Annotated[tuple[int, ...], _hint("outputs")] = ()
    """Classes."""
    base: Annotated[
        tuple[int, int, int, int] | None,
        hint("WIDTH DEPTH BATCH OUTPUTS", "512 4 1000 10; 256 4 500 10 with --quick"),
    ] = None
    """What the others are while one is swept."""
    inverse: Inverse = "block_diagonal"
    """Approximate inverse Fisher."""
    preset: Preset = "paper"
    """Constants of the paper's experiments, or of kronfac."""
    seconds: Annotated[float | None, hint("FLOAT", "120; 5 with --quick")] = None
    """To spend on each size, in rounds of up to 19 steps from the start; a round may take longer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, **{_plural(name): values for name, values in self.plan.sweeps.items()})
        at_least(1, base=tuple(asdict(self.plan.base).values()))
        at_least(0, seconds=self.plan.seconds)

    @property
    def plan(self) -> Plan:
        """As given, or as the setting has it."""
        usual = QUICK if self.quick else FULL
        return Plan(
            base=usual.base if self.base is None else Sizes(*self.base),
            sweeps={
                name: getattr(self, _plural(name)) or values
                for name, values in usual.sweeps.items()
            },
            seconds=usual.seconds if self.seconds is None else self.seconds,
        )


def _plural(name: str) -> str:
    return {"batch": "batches", "outputs": "outputs"}.get(name, f"{name}s")


def scaling_command(config: ScalingConfig) -> list[Path]:
    """Measure what has not been measured; show and write all of it."""
    console = Console(highlight=False, soft_wrap=True)
    torch.set_num_threads(config.threads)
    quick = "-quick" if config.quick else ""
    path = config.folder(f"scaling-{config.inverse}-{config.preset}{quick}") / "scaling.json"
    names = ("inverse", "preset", "threads", "seed")
    settings = {name: getattr(config, name) for name in names} | {"seconds": config.plan.seconds}
    sweeps = _sweeps(config)
    left_out: dict[str, str] = {}
    jobs = {
        str(point.sizes): partial(_measure, config, point, left_out)
        for points in sweeps.values()
        for point in points
    }
    trials = {t.name: t for t in run_trials(path, settings, ScalingTrial, jobs, console)}
    document = Document(
        title="How a step scales",
        command=command_line("bench scaling", config),
        settings=described(
            config.threads,
            config.seed,
            f"tanh network with a softmax around {config.plan.base}",
            config.inverse.replace("_", "-"),
            f"preset {config.preset} ({in_words(config.preset)})",
            "interleaved steps",
        ),
        tables=tables(sweeps, trials, left_out),
        plots=plots(sweeps, trials),
    )
    return publish(document, path, config.output, console)


def _sweeps(config: ScalingConfig) -> dict[str, list[Point]]:
    tridiagonal = config.inverse == "block_tridiagonal"
    sweeps: dict[str, list[Point]] = {}
    for name, values in config.plan.sweeps.items():
        every = [replace(config.plan.base, **{name: value}) for value in values]
        sweeps[name] = [
            Point(value, sizes, theory(sizes, tridiagonal))
            for value, sizes in zip(values, every, strict=True)
        ]
    return sweeps


def _measure(
    config: ScalingConfig, point: Point, left_out: dict[str, str], advance: Advance
) -> ScalingTrial:
    sizes = point.sizes
    try:
        if point.theory.needed > (free := available()):
            needed = point.theory.needed
            raise LeftOutError(f"needs about {needed / GB:.1f} GB, {free / GB:.1f} GB are free")
        peak = measured(sizes, config.inverse, config.preset, config.threads, config.seed)
    except LeftOutError as reason:
        left_out[str(sizes)] = str(reason)
        raise
    advance(0.5)
    schedule = Schedule.of_preset(config.preset, sizes.batch)
    rounds: list[Round] = []
    start = time.perf_counter()
    while not rounds or time.perf_counter() - start < config.plan.seconds:
        rounds.append(_round(config, sizes, schedule, start + config.plan.seconds))
    advance(0.5)
    shapes = operations.shapes_of(sizes.widths)
    tridiagonal = config.inverse == "block_tridiagonal"
    return ScalingTrial(
        name=str(sizes),
        sizes=asdict(sizes),
        sgd_seconds=median(one.sgd for one in rounds),
        parts={part: median(one.parts[part] for one in rounds) for part in rounds[0].parts},
        ratios=[sum(one.parts.values()) / one.sgd for one in rounds],
        sgd_operations=operations.sgd(shapes, sizes.batch),
        operations=operations.kfac(shapes, sizes.batch, schedule, tridiagonal),
        peak_bytes=peak,
        theory=asdict(point.theory),
    )


@dataclass(frozen=True)
class Round:
    """Seconds of an average step, from the first steps of a training."""

    sgd: float
    parts: dict[str, float]
    """K-FAC's, as often as the schedule has them done."""


def _round(config: ScalingConfig, sizes: Sizes, schedule: Schedule, deadline: float) -> Round:
    """To the first ρ at least, and not to the first search for γ, where parts are done three times."""
    pair = PairedSteps(
        lambda: network(sizes, config.seed),
        Categorical(),
        {"inverse": config.inverse, **arguments(config.preset)},
    )
    x, y = cases(sizes, config.seed)
    least = int(max(FIRST_REFRESHES, schedule.T1 if schedule.T1 < schedule.T2 else 0)) + 1
    most = int(min(schedule.T2, 20)) - 1
    sgd: list[float] = []
    parts: dict[str, list[float]] = defaultdict(list)
    for k in range(1, most + 1):
        seconds = pair.step(x, y)
        if k > 1:  # the first one warms up
            sgd.append(seconds.sgd)
            for part, spent in seconds.parts.items():
                parts[part].append(spent)
        if k >= least and time.perf_counter() > deadline:
            break
    times = schedule.times
    return Round(median(sgd), {p: times.get(p, 1.0) * median(spent) for p, spent in parts.items()})
