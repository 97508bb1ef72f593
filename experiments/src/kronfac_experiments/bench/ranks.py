"""`kronfac bench ranks`: steps in 1, 2 and 4 real processes.

Bytes are those that the loopback interface counts, over all processes: what really travels, with the
headers of every packet. CPU time is that of the busiest process, because processes share the processors.
Messages and sums are those that the optimizer has counted.
"""

import json
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from kronfac import KFAC
from kronfac.distributed import World
from kronfac_experiments.bench import BenchOptions, publish, spread
from kronfac_experiments.options import at_least
from kronfac_experiments.pages.document import Table

LOOPBACK = "lo"
MB = 1e6


@dataclass(frozen=True)
class RanksConfig(BenchOptions):
    """Seconds, bytes and messages of a step in several processes."""

    threads: int = 1
    """CPU threads of each process."""
    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes, each with its part of the mini-batch."""
    inverse: Literal["block_diagonal", "block_tridiagonal", "ekfac"] = "block_diagonal"
    """The inverse."""
    widths: tuple[int, ...] = (784, 500, 250, 10)
    """Units of the layers of a perceptron."""
    batch: int = 2048
    """Examples of the mini-batch of all processes together."""
    warm_up: int = 22
    """Steps before: λ settles in the first twenty, with a measurement of ρ in each."""
    steps: int = 20
    """Steps of a repeat: as many as lie between two refreshes."""
    repeats: int = 3
    """Repeats; their median, smallest and largest are shown."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("processes", "widths", "batch", "steps", "repeats"):
            at_least(1, **{name: getattr(self, name)})


@dataclass(frozen=True)
class RankRun:
    """One rank, measured."""

    cpu: list[float]
    """CPU seconds of a step, a repeat each."""
    wall: list[float]
    """Seconds of a step, a repeat each."""
    travelled: list[float]
    """Bytes on the loopback interface in a step, those of all processes, a repeat each."""
    messages: list[float]
    """Messages on the host in a step, a repeat each."""
    sums: list[float]
    """Sums of tensors over the processes in a step, a repeat each."""


def ranks_command(config: RanksConfig) -> list[Path]:
    """Run the processes; show and write what they took."""
    console = Console(highlight=False, soft_wrap=True)
    found = measure(config, console)
    settings = (
        f"perceptron {'-'.join(map(str, config.widths))}",
        f"mini-batch {config.batch} over all processes",
        f"{config.inverse}, plain model, gloo on loopback",
        f"{config.repeats} × {config.steps} steps after {config.warm_up}",
    )
    return publish("ranks", "Steps in several processes", config, settings, [_table(found)])


def measure(config: RanksConfig, console: Console) -> dict[int, list[RankRun]]:
    """Run each number of processes; the runs of their ranks."""
    found = {}
    for size in config.processes:
        console.print(f"{size} processes")
        found[size] = _run(config, size)
    return found


def _table(found: dict[int, list[RankRun]]) -> Table:
    rows = []
    for size, ranks in found.items():
        busiest = max(ranks, key=lambda run: median(run.cpu))
        slowest = [1e3 * max(walls) for walls in zip(*(run.wall for run in ranks), strict=True)]
        rows.append(
            (
                f"{size}",
                spread([1e3 * seconds for seconds in busiest.cpu], "{:.0f}".format),
                spread(slowest, "{:.0f}".format),
                spread([sent / size / MB for sent in ranks[0].travelled], "{:.2f}".format),
                spread(ranks[0].messages, "{:.2f}".format),
                spread(ranks[0].sums, "{:.2f}".format),
            )
        )
    columns = (
        "processes",
        "CPU ms of a step, busiest",
        "ms of a step",
        "MB sent by a process in a step",
        "messages in a step",
        "sums of tensors",
    )
    note = (
        "Median (smallest – largest) of the repeats. Processes share the "
        "processors of one machine, so that ms of a step say little for more of them than there are. Bytes "
        "by the counters of the loopback interface, divided by the processes. Messages and sums of rank 0; "
        "refreshes and validations have messages of their own."
    )
    return Table("Seconds and bytes", columns, rows, note)


def _problem(config: RanksConfig) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(config.seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(config.widths, config.widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    x = torch.randn(config.batch, config.widths[0])
    y = torch.randint(config.widths[-1], (config.batch,))
    return nn.Sequential(*layers[:-1]), x, y


def _run(config: RanksConfig, size: int) -> list[RankRun]:
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, args=(size, folder, config), nprocs=size)
        files = [Path(folder) / f"{rank}.json" for rank in range(size)]
        return [RankRun(**json.loads(file.read_text())) for file in files]


def _rank(rank: int, size: int, folder: str, config: RanksConfig) -> None:
    """One process."""
    torch.set_num_threads(config.threads)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    run = _measure(config, rank, size)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(run)))
    dist.barrier()
    dist.destroy_process_group()


def _measure(config: RanksConfig, rank: int, size: int) -> RankRun:
    model, x, y = _problem(config)
    part = slice(rank * config.batch // size, (rank + 1) * config.batch // size)
    x, y = x[part], y[part]
    optimizer = KFAC(model, nn.CrossEntropyLoss(), inverse=config.inverse)
    for _ in range(config.warm_up):
        optimizer.step(optimizer.closure(x, y))
    world = World.current()
    cpu, wall, travelled, tallies = [], [], [], [_numbers(world)]
    for _ in range(config.repeats):
        dist.barrier()
        counted, began, used = _loopback(), time.perf_counter(), time.process_time()
        for _ in range(config.steps):
            optimizer.step(optimizer.closure(x, y))
        cpu.append((time.process_time() - used) / config.steps)
        wall.append((time.perf_counter() - began) / config.steps)
        dist.barrier()
        travelled.append((_loopback() - counted) / config.steps)
        tallies.append(_numbers(world))
    told = {
        name: [(after[name] - before[name]) / config.steps for before, after in pairwise(tallies)]
        for name in tallies[0]
    }
    return RankRun(cpu, wall, travelled, **told)


def _numbers(world: World) -> dict[str, float]:
    """How often this process has talked to the others so far."""
    return {"messages": float(world.messages.total()), "sums": float(world.sums)}


def _loopback() -> int:
    """Bytes that the loopback interface has sent so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LOOPBACK:
            return int(numbers.split()[8])
    return 0
