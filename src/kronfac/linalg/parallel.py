"""Apply a function to many matrices in parallel: on a CPU each in a thread with its own core.

LAPACK uses several cores badly for one decomposition, in particular a small one. Its threads wait for each
other after every panel, and mostly wait if another process uses one of the cores.
"""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor

R = TypeVar("R")

LARGE = 128
"""Matrices with at least this many rows get a thread of their own."""


def each(function: Callable[..., R], matrices: Sequence[Tensor], *others: Sequence[Any]) -> list[R]:
    """Call `function` with each matrix and the items of the other sequences at the same position.

    Results are in the order of the matrices. Of several errors, the first in this order is raised.
    """
    arguments = list(zip(matrices, *others, strict=True))
    threads = torch.get_num_threads()
    large = [i for i, M in enumerate(matrices) if len(M) >= LARGE and M.device.type == "cpu"]
    if threads == 1 or len(large) < 2:
        return [function(*a) for a in arguments]
    grad = torch.is_grad_enabled()

    def work(index: int) -> R:
        with torch.set_grad_enabled(grad):  # a setting per thread
            return function(*arguments[index])

    futures: dict[int, Future[R]] = {}
    try:
        for i in sorted(large, key=lambda i: -len(matrices[i])):  # the largest first
            if (future := _submit(_pool(threads), partial(work, i))) is not None:
                futures[i] = future
        return [
            futures[i].result() if i in futures else function(*a) for i, a in enumerate(arguments)
        ]
    finally:
        for future in futures.values():  # those that have not started, if one failed
            future.cancel()


def in_background(work: Callable[[], R]) -> Future[R] | None:
    """Run `work` in a thread with its own core while the calling thread goes on.

    Work is done in the order of the calls. None if Python is shutting down and starts no more threads.
    """
    return _submit(_pool(1, "kronfac-background"), work)


def _submit(pool: ThreadPoolExecutor, work: Callable[[], R]) -> Future[R] | None:
    try:
        return pool.submit(work)
    except RuntimeError:  # Python is shutting down: pools take no more work
        return None


@cache
def _pool(threads: int, name: str = "kronfac") -> ThreadPoolExecutor:
    """A pool of threads, each of which computes alone."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, name, initializer=_alone)
    started = threading.Barrier(threads)
    try:
        futures = [_submit(pool, started.wait) for _ in range(threads)]
        if None in futures:
            started.abort()
        for future in futures:
            if future is not None:
                future.result()
    except threading.BrokenBarrierError:
        pool.shutdown(wait=False)
    except BaseException:
        started.abort()
        pool.shutdown(wait=False)
        raise
    finally:
        # The setting of a thread is also the first setting of threads that start later.
        torch.set_num_threads(before)
    return pool


def _alone() -> None:
    """Use one core for what this thread computes."""
    torch.get_num_threads()  # the first call in a thread overwrites the thread's setting
    torch.set_num_threads(1)


# A forked process inherits the pool, but not its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
