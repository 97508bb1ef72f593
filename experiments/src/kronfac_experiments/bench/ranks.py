"""`kronfac bench ranks`: steps in 1, 2 and 4 real processes, beside what the plan says of them.

Bytes are those that the loopback interface counts, over all processes: what really travels, with the
headers of every packet. CPU time is that of the busiest process, because processes share the processors.
Messages and sums are those that the optimizer has counted.
"""

import json
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from kronfac import KFAC, World, plan
from kronfac.distributed import Processes, Tally
from kronfac.planning.live_bytes import LiveBytes
from kronfac.storage import tensors_in
from kronfac_experiments.config import hint
from kronfac_experiments.options import at_least, command_line
from kronfac_experiments.pages.document import Document, Table, spread
from kronfac_experiments.pages.publish import publish

LOOPBACK = "lo"
MB = 1e6


@dataclass(frozen=True)
class RanksConfig:
    """Seconds, bytes and memory of a step in several processes, beside the plan's."""

    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes, each with its part of the mini-batch."""
    shares: tuple[float, ...] = (1.0,)
    """Shares of the processes that hold each inverse; those that make no difference are left out."""
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
    seed: int = 0
    """Seed of parameters and data."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/bench-ranks")] = None
    """Folder for the measurements (JSON) and the page."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """Write the table there, too, as Markdown."""

    def __post_init__(self) -> None:
        for name in ("processes", "widths", "batch", "steps", "repeats"):
            at_least(1, **{name: getattr(self, name)})
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            words = " ".join(map(str, self.shares)) or "none"
            raise ValueError(f"--shares lie above 0 and are at most 1; got {words}.")

    @property
    def worlds(self) -> list[World]:
        """What is measured: every number of processes with every share that makes other groups."""
        found: dict[tuple[int, int], World] = {}
        for size in self.processes:
            for share in self.shares:
                world = World(size, inverse_share=share)
                found.setdefault((size, world.groups), world)
        return list(found.values())


@dataclass(frozen=True)
class RankRun:
    """One rank, measured."""

    cpu: list[float]
    """CPU seconds of a step, a repeat each."""
    wall: list[float]
    """Seconds of a step, a repeat each."""
    travelled: list[float]
    """Bytes on the loopback interface in a step, those of all processes, a repeat each."""
    peak: int
    """Bytes that live at the most in a step with a refresh."""
    inverses: int
    """Bytes of inverses that the rank holds between steps."""
    messages: list[float]
    """Messages on the host in a step, a repeat each, as the following."""
    sums: list[float]
    """Sums of tensors over the processes in a step."""
    talked: list[float]
    """Seconds of a step in messages."""
    under_way: list[float]
    """Seconds of a step from the start of sums to their arrival, added up."""
    waited: list[float]
    """Seconds of a step in which the rank waited for sums."""


def ranks_command(config: RanksConfig) -> list[Path]:
    """Run the processes; show and write what they took."""
    console = Console(highlight=False, soft_wrap=True)
    found = {}
    for world in config.worlds:
        console.print(f"{_label(world)} processes")
        found[world] = _run(config, world)
    rows = []
    for world, ranks in found.items():
        model, x, y = _problem(config)
        settings: dict[str, Any] = {"inverse": config.inverse}
        whole = plan(model, nn.CrossEntropyLoss(), x, y, world=world, **settings)
        own = whole.world
        assert own is not None
        size, held = world.processes, [0] * world.groups
        for row, owner in zip(whole.rows, own.assignment, strict=True):
            held[world.group(owner)] += row.inverse
        busiest = max(ranks, key=lambda run: median(run.cpu))
        each = [t / size / MB for t in ranks[0].travelled]
        rows.append(
            (
                f"{size}",
                f"1/{world.groups}" if world.groups > 1 else "1",
                spread([1e3 * s for s in busiest.cpu], lambda ms: f"{ms:.0f}"),
                f"{1e3 * sum(own.computation.values()):.0f}",
                spread([1e3 * max(w) for w in zip(*(r.wall for r in ranks), strict=True)], str_ms),
                spread(each, lambda mb: f"{mb:.2f}"),
                f"{sum(own.bytes.values()) / MB:.2f}",
                f"{max(run.inverses for run in ranks) / MB:.2f}",
                f"{max(held) / MB:.2f}",
                f"{max(run.peak for run in ranks) / MB:.1f}",
                f"{own.memory.total / MB:.1f}",
            )
        )
    columns = (
        "processes",
        "share that holds an inverse",
        "CPU ms of a step, busiest",
        "planned",
        "ms of a step",
        "MB sent by a process in a step",
        "planned",
        "MB of inverses held, most",
        "planned",
        "MB held in a step, most",
        "planned",
    )
    note = (
        "Median (smallest – largest) of the repeats. One thread in each process. Processes share the "
        "processors of one machine, so that ms of a step say little for more of them than there are. Bytes "
        "by the counters of the loopback interface, divided by the processes; memory: bytes of tensors "
        "that live at once in a step with a refresh."
    )
    folder = config.run_dir or Path("runs") / "bench-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "ranks.json"
    path.write_text(
        json.dumps(
            {_label(world): [asdict(run) for run in ranks] for world, ranks in found.items()},
            indent=1,
        )
    )
    document = Document(
        title="Steps in several processes",
        command=command_line("bench ranks", config),
        settings=(
            f"Perceptron {'-'.join(map(str, config.widths))}, float32, mini-batch {config.batch} over all "
            f"processes, {config.inverse}, plain model, gloo on loopback, {config.repeats} × "
            f"{config.steps} steps after {config.warm_up}, seed {config.seed}, torch {torch.__version__}."
        ),
        tables=(Table("Measured and planned", columns, rows, note), _communication(found)),
    )
    return publish(document, path, config.output, console)


def _communication(found: dict[World, list[RankRun]]) -> Table:
    """How often processes talk to each other, and how long they wait for that."""
    rows = []
    for world, ranks in found.items():
        if world.processes == 1:
            continue
        first = ranks[0]
        pairs = zip(first.waited, first.under_way, strict=True)
        rows.append(
            (
                _label(world),
                spread(first.messages, lambda number: f"{number:.2f}"),
                spread(first.sums, lambda number: f"{number:.2f}"),
                spread([1e3 * seconds for seconds in first.talked], str_ms),
                spread([1e3 * seconds for seconds in first.under_way], str_ms),
                spread([1e3 * seconds for seconds in first.waited], str_ms),
                spread(
                    [100 * waited / way for waited, way in pairs], lambda share: f"{share:.0f} %"
                ),
            )
        )
    columns = (
        "processes",
        "messages in a step",
        "sums of tensors",
        "ms in messages",
        "ms that sums were under way",
        "ms of them waited for",
        "share",
    )
    note = (
        "Of rank 0; with refreshes and validations, which have messages of their own. What is not waited "
        "for travels while the process computes. A message takes until the slowest process has sent its "
        "own, and so does a sum."
    )
    return Table("Messages and sums", columns, rows, note)


def str_ms(ms: float) -> str:
    """Milliseconds as a table has them."""
    return f"{ms:.0f}"


def _problem(config: RanksConfig) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(config.seed)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(config.widths, config.widths[1:], strict=False):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    x = torch.randn(config.batch, config.widths[0])
    y = torch.randint(config.widths[-1], (config.batch,))
    return nn.Sequential(*layers[:-1]), x, y


def _label(world: World) -> str:
    """The number of processes, and the groups that hold an inverse if not all of them do."""
    return f"{world.processes}" + (f" in {world.groups} groups" if world.groups > 1 else "")


def _run(config: RanksConfig, world: World) -> list[RankRun]:
    size = world.processes
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, world.inverse_share, folder, asdict(config))
        spawn(_rank, args=arguments, nprocs=size)
        files = [Path(folder) / f"{rank}.json" for rank in range(size)]
        return [RankRun(**json.loads(file.read_text())) for file in files]


def _rank(rank: int, size: int, share: float, folder: str, given: dict[str, object]) -> None:
    """One process."""
    torch.set_num_threads(1)
    config = RanksConfig(**given)  # type: ignore[arg-type]
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
    run = _measure(config, rank, size, share)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(asdict(run)))
    dist.barrier()
    dist.destroy_process_group()


def _measure(config: RanksConfig, rank: int, size: int, share: float) -> RankRun:
    model, x, y = _problem(config)
    part = slice(rank * config.batch // size, (rank + 1) * config.batch // size)
    x, y = x[part], y[part]
    optimizer = _optimizer(config, model, share)
    for _ in range(config.warm_up):
        optimizer.step(optimizer.closure(x, y))
    tally, world = TimedTally(), Processes.current()
    if isinstance(world, Processes):
        # Sums are counted from the start, in which the ranks have to agree.
        tally.sums, world.tally = world.tally.sums, tally
    cpu, wall, travelled, tallies = [], [], [], [tally.numbers]
    for _ in range(config.repeats):
        dist.barrier()
        counted, began, used = _loopback(), time.perf_counter(), time.process_time()
        for _ in range(config.steps):
            optimizer.step(optimizer.closure(x, y))
        cpu.append((time.process_time() - used) / config.steps)
        wall.append((time.perf_counter() - began) / config.steps)
        dist.barrier()
        travelled.append((_loopback() - counted) / config.steps)
        tallies.append(tally.numbers)
    told = {
        name: [(after[name] - before[name]) / config.steps for before, after in pairwise(tallies)]
        for name in tallies[0]
    }
    current = optimizer._state.current
    assert current is not None
    held = sum(t.numel() * t.element_size() for t in tensors_in(current.inverse))
    return RankRun(cpu, wall, travelled, _peak(config, rank, size, share), held, **told)


@dataclass
class TimedTally(Tally):
    """A tally that also knows for how long sums were under way."""

    arrivals: list[float] = field(default_factory=list)
    """Seconds from the start of every sum to its arrival."""

    def started(self, flat: Tensor, work: dist.Work) -> None:
        """Count a sum that was started, and note when it arrives."""
        super().started(flat, work)
        began = time.perf_counter()
        work.get_future().add_done_callback(
            lambda _: self.arrivals.append(time.perf_counter() - began)
        )

    @property
    def numbers(self) -> dict[str, float]:
        """What this process has sent so far, and how long it took."""
        return {
            "messages": float(self.messages.total()),
            "sums": float(self.sums),
            "talked": self.talked,
            "under_way": sum(self.arrivals),
            "waited": self.waited,
        }


def _optimizer(config: RanksConfig, model: nn.Module, share: float) -> KFAC:
    return KFAC(model, nn.CrossEntropyLoss(), inverse=config.inverse, inverse_share=share)


def _peak(config: RanksConfig, rank: int, size: int, share: float) -> int:
    """Bytes that live in the first steps, each of which refreshes the inverse."""
    with LiveBytes() as live:
        model, x, y = _problem(config)
        part = slice(rank * config.batch // size, (rank + 1) * config.batch // size)
        data = x.numel() * x.element_size() + y.numel() * y.element_size()
        x, y = x[part].clone(), y[part].clone()
        optimizer = _optimizer(config, model, share)
        optimizer.step(optimizer.closure(x, y))
        live.course.clear()
        optimizer.step(optimizer.closure(x, y))
    return int(max(live.course)) - data


def _loopback() -> int:
    """Bytes that the loopback interface has sent so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LOOPBACK:
            return int(numbers.split()[8])
    return 0
