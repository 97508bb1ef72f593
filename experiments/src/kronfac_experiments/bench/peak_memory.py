"""Peak memory of K-FAC, measured in a process of its own, and what it should be.

PyTorch keeps no record of what it held on a CPU at most; the operating system does, of a whole process.
So every size has a fresh process, and what that held before the network was built is taken off.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kronfac import KFAC, Categorical, GammaSearch
from kronfac_experiments.bench.chain import Inverse, Sizes, cases, network
from kronfac_experiments.bench.operations import Shape, shapes_of
from kronfac_experiments.bench.schedule import Preset, arguments
from kronfac_experiments.bench.trials import LeftOutError
from kronfac_experiments.plain_steps import KfacSteps

NUMBER = 4
"""Bytes of a float32."""
STEPS = 2
"""The second has the update before it, and an inverse that is replaced."""


@dataclass(frozen=True)
class Theory:
    """Bytes that K-FAC needs, by what for."""

    parameters: int
    """Five vectors: θ, its gradient, that in matrices, Δ and δ₀."""
    factors: int
    inverses: int
    """Two sets: the one in use and the one being made."""
    activations: int
    """Bytes of one pass over the mini-batch: what every layer returned and what tanh made of it. Not
    K-FAC's own, SGD has most of it too."""

    @property
    def kfac(self) -> int:
        """Without activations."""
        return self.parameters + self.factors + self.inverses

    @property
    def needed(self) -> int:
        """What to have free: the peak is about twice the theory, with working memory."""
        return 2 * (self.kfac + self.activations)


def theory(sizes: Sizes, tridiagonal: bool) -> Theory:
    """Counted from the shapes."""
    shapes = shapes_of(sizes.widths)
    numbers = sum(outputs * inputs for outputs, inputs in shapes)
    units = sum(sizes.widths[1:])
    return Theory(
        parameters=5 * NUMBER * numbers,
        factors=NUMBER * (_squares(shapes) + (_neighbours(shapes) if tridiagonal else 0)),
        inverses=2 * NUMBER * (_squares(shapes) + (_correction(shapes) if tridiagonal else 0)),
        activations=2 * NUMBER * sizes.batch * units,
    )


def _squares(shapes: Sequence[Shape]) -> int:
    return sum(outputs**2 + inputs**2 for outputs, inputs in shapes)


def _neighbours(shapes: Sequence[Shape]) -> int:
    return sum(o * next_o + i * next_i for (o, i), (next_o, next_i) in pairwise(shapes))


def _correction(shapes: Sequence[Shape]) -> int:
    """Ψ, K and the weights between them, of full rank."""
    total = _neighbours(shapes)
    for (o, i), (next_o, next_i) in pairwise(shapes):
        r2, r1 = min(o, next_o), min(i, next_i)
        total += o * r2 + i * r1 + r2 * r1
    return total


def available() -> float:
    """Bytes that a process may still take; infinite if that can't be known."""
    limits = [float("inf")]
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(1024 * float(line.split()[1]))
        group = Path("/sys/fs/cgroup")
        limit, used = (group / f"memory.{name}" for name in ("max", "current"))
        limits.append(float(limit.read_text()) - float(used.read_text()))
    except (OSError, ValueError):
        pass  # not Linux, or no limit ("max")
    return min(limits)


def measured(sizes: Sizes, inverse: Inverse, preset: Preset, threads: int, seed: int) -> int:
    """Bytes at the peak of two steps that both search for γ, which need most.

    Raises:
        LeftOutError: the process failed, for lack of memory perhaps.
    """
    task = {
        "sizes": asdict(sizes),
        "inverse": inverse,
        "preset": preset,
        "threads": threads,
        "seed": seed,
    }
    return int(run_alone(__name__, task))


def run_alone(module: str, task: dict[str, Any]) -> str:
    """What a module prints in a process of its own, started with this task as its argument.

    Raises:
        LeftOutError: the process failed, for lack of memory perhaps.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(task)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise LeftOutError(f"its memory could not be measured: {last}")
    return done.stdout


def main(task: dict[str, Any]) -> None:
    """What the process of its own does: print the number."""
    torch.set_num_threads(task["threads"])
    more = arguments(task["preset"]) | {"inverse": task["inverse"]}
    # The least steps with a search for γ in them.
    more |= {"inverse_interval": 1, "gamma": GammaSearch(interval=1)}
    _held(Sizes(width=8, depth=2, batch=16, outputs=4), more, task["seed"])  # loads what loads late
    print(_held(Sizes(**task["sizes"]), more, task["seed"]))


def _held(sizes: Sizes, more: dict[str, Any], seed: int) -> int:
    x, y = cases(sizes, seed)
    _forget_peak()
    before = _resident()
    kfac = KfacSteps(KFAC(network(sizes, seed), Categorical(), **more))
    for _ in range(STEPS):
        kfac.step(x, y)
    return _peak() - before


def _peak() -> int:
    """Bytes that this process held at most.

    Linux counts `ru_maxrss` from the process that started this one, which may have been larger;
    `VmHWM` is this program's own.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        return _status("VmHWM")
    import resource  # noqa: PLC0415 - not on Windows

    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else 1024 * usage


def _forget_peak() -> None:
    """Importing takes more than it keeps; Linux can count anew."""
    with suppress(OSError):  # elsewhere; the peak of a large network is above it anyway
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def _resident() -> int:
    return _status("VmRSS") if Path("/proc/self/status").is_file() else _peak()


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    raise OSError(f"/proc/self/status has no {name}.")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
