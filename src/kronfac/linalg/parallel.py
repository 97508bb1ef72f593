"""One function on many matrices, several at a time: on a CPU each in a thread with a core to itself.

LAPACK spreads a decomposition over the cores badly, the worse the smaller it is: its threads wait for each
other after every panel, and do little else if another process has one of the cores.
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
"""Rows from which a matrix is worth a thread."""


def each(function: Callable[..., R], matrices: Sequence[Tensor], *others: Sequence[Any]) -> list[R]:
    """`function` of each matrix, and of what the other sequences have in its place.

    Results are in the order of the matrices. Of several errors, the first in this order is raised.
    """
    arguments = list(zip(matrices, *others, strict=True))
    threads = torch.get_num_threads()
    large = [i for i, M in enumerate(matrices) if len(M) >= LARGE and M.device.type == "cpu"]
    if threads == 1 or len(large) < 2:
        return [function(*a) for a in arguments]
    grad = torch.is_grad_enabled()

    def work(index: int) -> R:
        with torch.set_grad_enabled(grad):  # which every thread has its own setting of
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
        for future in futures.values():  # what is left if one failed
            future.cancel()


def in_background(work: Callable[[], R]) -> Future[R] | None:
    """The result of `work`, from a thread with a core to itself, while the calling one goes on.

    Work is done in the order of the calls. None if there are no more threads, as when Python ends.
    """
    return _submit(_pool(1, "kronfac-background"), work)


def _submit(pool: ThreadPoolExecutor, work: Callable[[], R]) -> Future[R] | None:
    try:
        return pool.submit(work)
    except RuntimeError:  # Python ends: its pools take no more work, though other threads go on
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
        pool.shutdown(wait=False)  # and takes no work
    except BaseException:
        started.abort()
        pool.shutdown(wait=False)
        raise
    finally:
        # A thread's own setting, but also what threads that start later begin with.
        torch.set_num_threads(before)
    return pool


def _alone() -> None:
    """One core for what this thread computes."""
    torch.get_num_threads()  # a thread's first question sets it up, over what was set before
    torch.set_num_threads(1)


# A forked process has the pool and not its threads.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)
