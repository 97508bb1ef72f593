"""The processes that `torchrun` starts: how they find each other, divide a mini-batch and fail together."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from kronfac import KronfacError
from kronfac.distributed import ALONE, World
from kronfac.errors import RankError

T = TypeVar("T")


class OtherRankError(KronfacError):
    """Something failed on another rank, and so on all of them."""


def current() -> World:
    """The processes that train together; one by itself outside of `torchrun`."""
    return World.current()


@contextmanager
def joined(device: str) -> Iterator[None]:
    """Join the processes of `torchrun`, if that has started this one and nobody has joined them yet.

    Args:
        device: What they train on: CUDA devices talk to each other by NCCL, all others by gloo.
    """
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not started or not dist.is_available() or dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def own_device(device: str) -> str:
    """The device of this rank: of the CUDA devices of a machine, each of its ranks has one."""
    several = current() is not ALONE
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if device == "cuda" and several else device


def own_part(indices: Tensor, world: World) -> Tensor:
    """This rank's part of the indices of a mini-batch: those from ⌊m r/n⌋ on, for rank r of n.

    Together, and in the order of the ranks, the parts are the mini-batch of one process.

    Raises:
        ValueError: there are fewer indices than ranks.
    """
    m, n, r = len(indices), world.size, world.rank
    if m < n:
        raise ValueError(
            f"A mini-batch of {m} case(s) can't be divided among {n} processes: each needs one at "
            "least. Give a larger --batch, or start fewer processes."
        )
    return indices[m * r // n : m * (r + 1) // n]


def together(world: World, action: Callable[[], T]) -> T:
    """What the action gives on this rank, once it has succeeded on all of them.

    Raises:
        OtherRankError: it failed on another rank. An error on this rank is raised as it is.
    """
    try:
        done = action()
    except Exception as error:
        with suppress(RankError):  # the others have ended, and this rank's own error says more
            _texts(world, f"{type(error).__name__}: {error}")
        raise
    for rank, said in enumerate(_texts(world, "")):
        if said:
            raise OtherRankError(f"Rank {rank} failed: {said}")
    return done


def _texts(world: World, text: str) -> list[str]:
    """The text of every rank, in the order of the ranks."""
    return world.exchange(text, torch.device("cpu"), "state")


def one_after_another(world: World, action: Callable[[], T]) -> T:
    """What the action gives; rank 0 goes first, so that what it leaves in a cache serves the others."""
    if world.rank == 0:
        done = together(world, action)
        together(world, lambda: None)
        return done
    together(world, lambda: None)
    return together(world, action)


def said_by_first(world: World, text: Callable[[], str]) -> str:
    """The text of rank 0, which alone is asked for it."""
    return _texts(world, text() if world.rank == 0 else "")[0]


def first_number(world: World, number: float) -> float:
    """The number of rank 0, such as a time: decisions that go by clocks must be the same everywhere."""
    return world.gather([number], "state")[0][0]


def largest(world: World, number: int) -> int:
    """The largest of the ranks' numbers."""
    return int(max(row[0] for row in world.gather([float(number)], "state")))


def total(world: World, number: int) -> int:
    """The sum of the ranks' numbers."""
    return int(world.total([float(number)], "state")[0])


def sum_over_ranks(world: World, tensors: list[Tensor]) -> None:
    """Add up tensors over the ranks, in place."""
    world.sum(tensors, "state")
