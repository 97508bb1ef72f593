"""`kronfac bench world`: the plan of a large transformer over growing numbers of processes.

Nothing is run: the model is on the `meta` device, and the speed of a process is what the options say. Runs
that were measured at few processes may be put beside their plans.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from torch import nn

from kronfac import Plan, World, WorldPlan, plan
from kronfac.planning.make_world import plan_world
from kronfac.planning.world import Wrapper
from kronfac_experiments.bench.world.model import decoder
from kronfac_experiments.bench.world.page import Measured, Plans, picture, tables
from kronfac_experiments.config import hint
from kronfac_experiments.options import at_least, command_line
from kronfac_experiments.pages.document import Document
from kronfac_experiments.pages.publish import publish


@dataclass(frozen=True)
class WorldConfig:
    """What several processes would compute, send and hold on a large transformer; nothing is run."""

    width: int = 4096
    """Numbers of a token."""
    depth: int = 32
    """Layers."""
    heads: int = 32
    """Heads of attention."""
    hidden: int = 11008
    """Numbers inside of a layer's perceptron."""
    vocabulary: int = 32000
    """Different tokens."""
    tokens: int = 2048
    """Tokens of a sequence."""
    sequences: int = 4096
    """Sequences of the mini-batch of all processes together."""
    micro_batch: int = 1
    """Sequences that a process takes through the model at once."""
    processes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
    """Numbers of processes."""
    bandwidth: float = 25e9
    """Bytes per second that a process sends."""
    latency: float = 10e-6
    """Seconds of a message."""
    flops: float = 1e14
    """Operations per second of a process in products."""
    inversion_flops: float = 5e12
    """Operations per second of a process in decompositions."""
    memory: float = 80e9
    """Bytes that a process may hold."""
    measured: Annotated[Path | None, hint("FILE.json", "none")] = None
    """A list of measured runs beside their plans; see `Measured` for their fields."""
    run_dir: Annotated[Path | None, hint("DIR", "runs/bench-world")] = None
    """Folder for the numbers (JSON) and the page."""
    output: Annotated[Path | None, hint("FILE.md", "none")] = None
    """Write the tables there, too, as Markdown."""

    def __post_init__(self) -> None:
        sizes = ("width", "depth", "heads", "hidden", "vocabulary", "tokens", "sequences")
        for name in (*sizes, "micro_batch", "processes"):
            at_least(1, **{name: getattr(self, name)})


def world_command(config: WorldConfig) -> list[Path]:
    """Compute the plans; show and write them."""
    console = Console(highlight=False, soft_wrap=True)
    model, x = decoder(
        config.width,
        config.depth,
        config.heads,
        config.hidden,
        config.vocabulary,
        config.sequences,
        config.tokens,
    )
    single = plan(model, nn.CrossEntropyLoss(), x)
    plans: Plans = {
        "replicated, inverses at all": _plans(config, single, "ddp", every=True),
        "replicated, inverses at one": _plans(config, single, "ddp", every=False),
        "sharded, inverses at all": _plans(config, single, "fsdp", every=True),
        "sharded, inverses at one": _plans(config, single, "fsdp", every=False),
    }
    measured = (
        []
        if config.measured is None
        else [Measured(**run) for run in json.loads(config.measured.read_text())]
    )
    folder = config.run_dir or Path("runs") / "bench-world"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "world.json"
    path.write_text(
        json.dumps({name: list(map(_row, own)) for name, own in plans.items()}, indent=1)
    )
    parameters = sum(row.count for row in single.rows)
    document = Document(
        title="Planned for several processes",
        command=command_line("bench world", config),
        settings=(
            f"Computed, not measured. A transformer of {parameters / 1e9:.2f} billion parameters in "
            f"{len(single.rows)} units, float32; {config.sequences} sequences of {config.tokens} tokens "
            f"in the mini-batch of all, {config.micro_batch} at once. A process: {config.flops:.3g} "
            f"operations per second in products, {config.inversion_flops:.3g} in decompositions, "
            f"{config.bandwidth:.3g} bytes per second, {1e6 * config.latency:g} µs a message in a ring, "
            f"{config.memory / 1e9:g} GB. Replicated: DistributedDataParallel sums gradients. Sharded: "
            "fully_shard divides parameters, gradients and vectors of their size. Statistics are held by "
            "all in either case."
        ),
        tables=tables(plans, measured),
        picture=picture(plans),
    )
    return publish(document, path, config.output, console)


def _plans(config: WorldConfig, single: Plan, wrapper: Wrapper, *, every: bool) -> list[WorldPlan]:
    return [
        plan_world(
            single,
            World(
                count,
                bandwidth=config.bandwidth,
                latency=config.latency,
                flops=config.flops,
                inversion_flops=config.inversion_flops,
                inverse_share=1.0 if every else 1 / count,
                wrapper=wrapper,
                micro_batch=config.micro_batch,
                memory=config.memory,
            ),
        )
        for count in sorted(config.processes)
    ]


def _row(own: WorldPlan) -> dict[str, object]:
    return {
        "world": asdict(own.world),
        "share": own.share,
        "computation": dict(own.computation),
        "communication": dict(own.communication),
        "bytes": dict(own.bytes),
        "memory": asdict(own.memory),
        "peak": own.memory.total,
        "balance": own.balance,
        "refresh": own.refresh,
    }
