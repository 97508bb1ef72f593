"""A rank that ends in the middle of a step is a RankError on the others, wherever they are."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PROGRAM = """
    import os, sys
    import torch, torch.distributed as dist
    from kronfac.distributed import World
    from kronfac.errors import RankError

    call, store = sys.argv[1:]
    rank = 0 if os.fork() else 1
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    world = World.current()
    tensors = [torch.ones(1000)]
    world.gather([1.0], "gradient")
    if rank == 1:
        if call == "sum":
            world.gather([], "statistics")
        os._exit(0)
    try:
        if call == "gather":
            world.gather([], "statistics")
        elif call == "sum":
            world.sum(tensors, "statistics")
        else:
            world.exchange(torch.ones(3), torch.device("cpu"), "statistics")
    except RankError as error:
        print(error)
"""


SLOW = [pytest.param(call, marks=pytest.mark.slow) for call in ("gather", "exchange")]


@pytest.mark.parametrize("call", ["sum", *SLOW])
def test_a_rank_that_has_ended_is_a_rank_error(call: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), call, str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert "Rank 0 got no answer from another rank" in done.stdout, done.stderr[-2000:]
