"""Real processes on loopback: `python -m tests.distributed.ranks FOLDER SIZES CASES…` runs cases in worlds.

One interpreter imports torch and forks every rank of every world: a rank is ready in no time. Each case is
run by all ranks of a world, and leaves what every rank found in FOLDER/CASE-SIZE-RANK.pt.
"""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Case = Callable[[int, int], Mapping[str, Any]]
"""What rank r of a world of n finds, by name; to be saved."""
TIMEOUT = timedelta(seconds=120)


def run_world(folder: Path, size: int, cases: Mapping[str, Case]) -> bool:
    """Run all cases in a world; whether no rank failed."""
    store = folder / f"store-{size}"
    children = [child for rank in range(size) if (child := _fork(folder, store, rank, size, cases))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return not any(codes)


def _fork(folder: Path, store: Path, rank: int, size: int, cases: Mapping[str, Case]) -> int:
    from tests.distributed import disagreements  # noqa: PLC0415, which imports this module

    child = os.fork()
    if child:
        return child
    code = 1
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT
        )
        for name, case in cases.items():
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
                warnings.filterwarnings("ignore", message="KFAC (refused|rejected) a step")
                # torch 2.7's own, when it writes a checkpoint
                warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
                torch.save(dict(case(rank, size)), folder / f"{name}-{size}-{rank}.pt")
            if name not in disagreements.DEADLY:
                dist.barrier()
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(folder: Path, sizes: list[int], names: list[str]) -> int:
    """Run the named cases, or all, in worlds of these sizes."""
    from tests.distributed import (  # noqa: PLC0415, which import this module
        cases,
        checkpoints,
        disagreements,
        inverse_faults,
        messages,
        preconditioned,
        refused_models,
    )

    torch.set_num_threads(1)
    several = (
        cases.CASES,
        checkpoints.CASES,
        disagreements.CASES,
        inverse_faults.CASES,
        messages.CASES,
        preconditioned.CASES,
        refused_models.CASES,
    )
    known = {name: case for some in several for name, case in some.items()}
    chosen = {name: known[name] for name in names or cases.CASES}
    return 0 if all(run_world(folder, size, chosen) for size in sizes) else 1


if __name__ == "__main__":
    sizes = [int(size) for size in sys.argv[2].split(",")]
    sys.exit(main(Path(sys.argv[1]), sizes, sys.argv[3:]))
