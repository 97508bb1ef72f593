"""Several processes: settings of the machine, and what each process computes, sends and holds in a step.

Data parallel, W ranks: each takes the gradient, the statistics and the Fisher products on its own share of
the examples. Gradients and new statistics are summed by all-reduces. At a refresh every unit is inverted by
one rank (`assignment.py`), and a group of g = f W ranks holds its inverse, with f the `inverse_share`
[Pauloski et al. 2021, KAISA]. Bytes that a process moves, by what they are, with n = W/g groups:

    gradient     2 P (W − 1)/W              DistributedDataParallel's own, if that does it
    statistics   2 S (W − 1)/W              packed: one triangle of a symmetric matrix
    inverses     I (g − 1)/g / T₃           of the group that holds most, each γ that is tried
    directions   P (n − 1)/n                from a holder to the rest; 0 if all hold everything
    bases        I (n − 1)/n                EKFAC's, for its second moments in every step
    control      5 messages of 1 kB         from every rank to every other
    parameters   P (W − 1)/W a pass         FSDP's own, if parameters are sharded

`make_world.py` computes it. Nothing overlaps in it, so that seconds are an upper bound for a process that
is as fast as it is said to be.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from kronfac.assignment import group_count, groups_of_ranks
from kronfac.planning.plan import Memory, readable

Wrapper = Literal["none", "ddp", "fsdp"]
Hops = Literal["ring", "tree"]
TORCH_OWN: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"none": (), "ddp": ("gradient",), "fsdp": ("gradient", "parameters")}
)
"""What torch sends by itself, without K-FAC, by the wrapper."""


@dataclass(frozen=True)
class World:
    """Several processes, and what connects them.

    Args:
        processes: W, how many there are.
        bandwidth: bytes per second that a process sends, and receives at the same time.
        latency: seconds of a message from one process to the next.
        flops: floating-point operations per second of a process in matrix products; a multiplication and an
            addition are two. None to measure it on the model's device.
        inversion_flops: the same in decompositions. None to measure it, or for `flops` if that is given.
        inverse_share: f in [1/W, 1], the share of the processes that hold the inverse of a unit: at 1
            inverses are sent to all at a refresh, at 1/W directions are in every step. `KFAC` has a setting
            of this name, which counts if a plan is made with a number of processes.
        wrapper: what sums gradients: `"none"` for K-FAC itself, `"ddp"` for DistributedDataParallel,
            `"fsdp"` for `fully_shard`, which divides parameters, gradients and vectors of their size.
        hops: how many messages one after another a collective takes: W − 1 in a `"ring"`, log₂ W in a
            `"tree"`.
        examples: in the mini-batch of all processes together; None for as many as the example has.
        micro_batch: examples that a process takes through the model at once; None for all of its own.
        memory: bytes that a process may hold; None for any.
    """

    processes: int
    bandwidth: float = 1.25e9
    latency: float = 50e-6
    flops: float | None = None
    inversion_flops: float | None = None
    inverse_share: float = 1.0
    wrapper: Wrapper = "none"
    hops: Hops = "ring"
    examples: int | None = None
    micro_batch: int | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        least = {
            "processes": self.processes,
            "examples": self.examples,
            "micro_batch": self.micro_batch,
        }
        for name, count in least.items():
            if count is not None and count < 1:
                raise ValueError(f"World needs {name} of 1 or more; got {count}.")
        positive = {
            "bandwidth": self.bandwidth,
            "flops": self.flops,
            "inversion_flops": self.inversion_flops,
            "memory": self.memory,
        }
        for name, value in positive.items():
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"World needs a {name} that is positive and finite; got {value}.")
        if not 0 <= self.latency < math.inf:
            raise ValueError(f"World needs a latency that is not negative; got {self.latency}.")
        if not 0 < self.inverse_share <= 1:
            raise ValueError(
                f"World needs an inverse_share between 1/{self.processes} and 1; got {self.inverse_share}."
            )
        kinds = {"wrapper": (self.wrapper, Wrapper), "hops": (self.hops, Hops)}
        for name, (kind, known) in kinds.items():
            if kind not in get_args(known):
                raise ValueError(
                    f"World needs {name} to be one of {get_args(known)}; got {kind!r}."
                )

    @property
    def groups(self) -> int:
        """n, the groups of ranks that hold the same inverses; they are as equal as can be."""
        return group_count(self.processes, self.inverse_share)

    def group(self, rank: int) -> int:
        """The group of a rank: neighbours are together."""
        return rank * self.groups // self.processes

    def group_sizes(self) -> list[int]:
        """The ranks of every group."""
        return [len(group) for group in groups_of_ranks(self.processes, self.inverse_share)]

    def sequence(self, ranks: int) -> int:
        """Messages one after another of a collective between so many ranks."""
        return ranks - 1 if self.hops == "ring" else math.ceil(math.log2(ranks))


@dataclass(frozen=True)
class WorldPlan:
    """What the busiest of several processes does in a step, the mean of the steps between refreshes."""

    world: World
    examples: tuple[int, int, int]
    """Examples of the mini-batch, of the statistics and of the Fisher products, of all processes."""
    share: tuple[int, int, int]
    """Those of the process that has most."""
    computation: Mapping[str, float]
    """Seconds by phase, named as in `Plan.cost`."""
    communication: Mapping[str, float]
    """Seconds by message."""
    bytes: Mapping[str, float]
    """Bytes that a process sends, by message."""
    memory: Memory
    """Bytes that the process holds which holds most."""
    assignment: tuple[int, ...]
    """The rank that inverts each unit, in the order of `Plan.rows`."""
    balance: float
    """Work of a refresh of the busiest rank over the mean; 1 if all have the same."""
    refresh: float
    """Seconds that a step with a refresh takes more than one without."""

    @property
    def seconds(self) -> float:
        """Seconds of a step if nothing overlaps."""
        return sum(self.computation.values()) + sum(self.communication.values())

    @property
    def overlapped(self) -> float:
        """Seconds of a step if all communication is hidden behind computation, or the other way round."""
        return max(sum(self.computation.values()), sum(self.communication.values()))

    @property
    def sent(self) -> float:
        """Bytes that K-FAC sends itself, without what DistributedDataParallel or FSDP sends."""
        own = TORCH_OWN[self.world.wrapper]
        return sum(count for kind, count in self.bytes.items() if kind not in own)

    @property
    def dominates(self) -> str:
        """The phase or message that takes longest."""
        parts = {**self.computation, **{f"sending {k}": s for k, s in self.communication.items()}}
        return max(parts, key=lambda name: parts[name])

    @property
    def fits(self) -> bool:
        """Whether a process may hold as much."""
        return self.world.memory is None or self.memory.total <= self.world.memory

    def __str__(self) -> str:
        w = self.world
        computed = ", ".join(f"{name} {_seconds(s)}" for name, s in self.computation.items() if s)
        moved = ", ".join(f"{kind} {readable(round(b))}" for kind, b in self.bytes.items() if b)
        idle = w.processes - len(set(self.assignment))
        lines = [
            f"In {w.processes:,} processes, a step takes {_seconds(self.overlapped)} to "
            f"{_seconds(self.seconds)}; most of all {self.dominates}",
            f"  examples of a process: {self.share[0]} of {self.examples[0]}, statistics "
            f"{self.share[1]} of {self.examples[1]}, Fisher products {self.share[2]} of {self.examples[2]}",
            f"  it computes {_seconds(sum(self.computation.values()))}: {computed}",
            f"  it sends in {_seconds(sum(self.communication.values()))}: {moved or 'nothing'}",
            f"  a refresh takes {_seconds(self.refresh)} more; its busiest process does "
            f"{self.balance:.2f} times the mean" + (f", {idle:,} do none" if idle else ""),
            f"  it holds about {readable(self.memory.total)}"
            + ("" if self.fits else f", more than its {readable(round(w.memory or 0))}"),
        ]
        return "\n".join(lines)


def _seconds(seconds: float) -> str:
    """Seconds as people read them."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.2g} µs" if seconds else "0 s"
