"""Memory of a step by its parts, from torch's own account of its allocator, beside the plan's estimate.

In a process of its own, as `peak_memory.py` has it: the profiler's account begins with an empty one.
"""

import gc
import json
import sys
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile

from kronfac import KFAC
from kronfac_experiments.bench.growing import Size, examples, network
from kronfac_experiments.bench.peak_memory import run_alone
from kronfac_experiments.plain_steps import KfacSteps

REFRESH = ("inverse", "direction", "fisher_products", "step_size")
STEPS = 3
"""Before the one that is looked at."""


@dataclass(frozen=True)
class PartMemory:
    """Bytes at the peak of each phase of a step, parameters and state included."""

    measured: dict[str, int]
    planned: dict[str, int]


def part_memory(size: Size, threads: int, seed: int) -> PartMemory:
    """The memory of one step with a refresh, in a process of its own.

    Raises:
        LeftOutError: the process failed, for lack of memory perhaps.
    """
    task = {"size": asdict(size), "threads": threads, "seed": seed}
    return PartMemory(**json.loads(run_alone(__name__, task).strip().splitlines()[-1]))


def main(task: dict[str, Any]) -> None:
    """What the process of its own does: print it."""
    torch.set_num_threads(task["threads"])
    size = Size(**task["size"])
    kfac = KFAC(network(size, task["seed"]), nn.CrossEntropyLoss(), inverse_interval=1)
    x, y = examples(size, task["seed"])
    memory = kfac.plan(x, y).memory
    steps = KfacSteps(kfac)
    for _ in range(STEPS):
        steps.step(x, y)
    gc.collect()
    noise = 0 if kfac.report is not None and kfac.report.memory == 1 else memory.noise
    with profile(profile_memory=True) as profiled:
        steps.step(x, y)
    before = memory.parameters + memory.gradients + memory.state + noise
    planned = {name: count + noise - memory.noise for name, count in memory.phases.items()}
    print(json.dumps({"measured": _phases(profiled, before), "planned": planned}))


def _phases(profiled: profile, before: int) -> dict[str, int]:
    results = profiled.kineto_results
    assert results is not None
    events = sorted(results.events(), key=lambda event: event.start_ns())
    memory = [event for event in events if event.name() == "[memory]"]
    times = [event.start_ns() for event in memory]
    sizes = [event.nbytes() for event in memory]  # type: ignore[attr-defined]
    held = [before, *(before + n for n in accumulate(sizes))]
    peaks: dict[str, int] = {}
    for event in events:
        part = event.name().removeprefix("kronfac.")
        if part == event.name():
            continue
        phase = "refresh" if part in REFRESH else {"gradient": "closure"}.get(part, part)
        end = event.start_ns() + event.duration_ns()
        own = held[bisect_right(times, event.start_ns()) : bisect_right(times, end) + 1]
        peaks[phase] = max(peaks.get(phase, 0), *own, 0)
    return {name: peaks[name] for name in ("closure", "statistics", "refresh")}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
