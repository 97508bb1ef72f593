"""Ranks that are killed: `python -m tests.experiments.killed_ranks FOLDER RANKS KILLS SEED WORDS…`.

Runs `kronfac train WORDS… --run-dir FOLDER/whole` on so many ranks, and the same in FOLDER/killed, where a
random rank is killed (SIGKILL) at a random time, as often as is asked for, and all are started again: most
times some iterations on, in some cases also on the way to the first one. The last line of the output says
how many rows the run had written each time.

It does to the ranks what `torchrun --max-restarts` does, with the same environment; but one interpreter
imports everything, reads the data and forks all ranks, so that a start takes no time.
"""

import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch._dynamo  # which torch imports with the first optimizer: four seconds, of every rank

from kronfac_experiments import task
from kronfac_experiments.cli import main

PATIENCE = 60.0
"""Seconds within which the other ranks have to end when one was killed."""


def start(ranks: int, words: Sequence[str], starts: int) -> list[int]:
    """Fork the ranks; their process ids."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [fork(rank, ranks, port, words, starts) for rank in range(ranks)]


def fork(rank: int, ranks: int, port: int, words: Sequence[str], starts: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RESTART_COUNT": str(starts),
        }
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's own
        code = main(list(words))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(children: Sequence[int], seconds: float) -> list[int]:
    """The exit codes of processes that end within this time."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                found, status = os.waitpid(child, os.WNOHANG)
                if found:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > end:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
            raise TimeoutError(f"of {len(children)} ranks, {len(codes)} have ended: {codes}")
        time.sleep(0.002)
    return [codes[child] for child in children]


def run_killed(run: Path, ranks: int, words: Sequence[str], kills: int, seed: int) -> list[int]:
    """Train, killing ranks on the way; the rows that the run had written at each time."""
    generator = random.Random(seed)
    whole = rows(run.with_name("whole"))
    killed: list[int] = []
    for starts in range(100):
        children = start(ranks, [*words, str(run)], starts)
        if len(killed) == kills:
            assert wait(children, 600.0) == [0] * ranks
            return killed
        if generator.random() < 0.2:  # at any time from the start on
            time.sleep(generator.expovariate(0.5))
        else:
            further = generator.randint(1, max(1, 2 * whole // kills - 1))
            wait_for_rows(run, rows(run) + further, children)
            time.sleep(generator.uniform(0.0, 0.1))
        written = rows(run)
        os.kill(generator.choice(children), signal.SIGKILL)
        for child in children:  # as torchrun does
            os.kill(child, signal.SIGTERM)
        codes = wait(children, PATIENCE)
        if not any(codes):  # they had come to the end
            return killed
        if -signal.SIGKILL in codes:
            killed.append(written)
    raise AssertionError("it never ended")


def rows(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_bytes().count(b"\n") if metrics.is_file() else 0


def wait_for_rows(run: Path, count: int, children: Sequence[int]) -> None:
    """Until so many rows are written, or a rank has ended."""
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    while rows(run) < count and not any(os.waitid(os.P_PID, child, how) for child in children):
        time.sleep(0.005)


def read_data_once(problem: str) -> None:
    """Let the ranks find MNIST in memory: what they are killed in is training."""
    if problem == "mnist16":
        torch.set_num_threads(1)  # threads do not survive a fork
        data = task.mnist_16x16()
        task.mnist_16x16 = lambda: data


if __name__ == "__main__":
    folder, ranks, kills, seed = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    words = ["train", *sys.argv[5:], "--run-dir"]
    read_data_once(sys.argv[5])
    assert wait(start(ranks, [*words, str(folder / "whole")], 0), 600.0) == [0] * ranks
    print("killed at rows:", *run_killed(folder / "killed", ranks, words, kills, seed))
