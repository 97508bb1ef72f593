"""Which process does which piece of work, by cost alone: the same on every process, without a message."""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def assign(costs: Sequence[float], ranks: int) -> tuple[int, ...]:
    """The rank of every piece of work: the most expensive first, each to the rank with the least so far.

    The largest load is at most (4/3 − 1/(3 ranks)) times that of the best assignment (Graham 1969, LPT).
    Of equal costs the earlier piece goes first, of equal loads the lower rank, so that all processes find
    the same.

    Args:
        costs: one of every piece, not negative.
        ranks: how many there are, at least 1.

    Raises:
        ValueError: there is no rank, or a cost is negative or NaN.
    """
    if ranks < 1:
        raise ValueError(f"assign needs at least one rank; got {ranks}.")
    if not all(cost >= 0 for cost in costs):
        raise ValueError(f"assign needs costs that are not negative; got {list(costs)}.")
    found = [0] * len(costs)
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    for piece in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        load, rank = loads[0]
        found[piece] = rank
        heapreplace(loads, (load + costs[piece], rank))
    return tuple(found)


def sums_by_rank(costs: Sequence[float], assignment: Sequence[int], ranks: int) -> list[float]:
    """The load of every rank."""
    loads = [0.0] * ranks
    for cost, rank in zip(costs, assignment, strict=True):
        loads[rank] += cost
    return loads


def group_count(ranks: int, share: float) -> int:
    """How many groups there are if each has at least this share of the ranks, rounded, and at least one."""
    return max(1, ranks // max(1, round(share * ranks)))


def groups_of_ranks(ranks: int, share: float) -> list[list[int]]:
    """The ranks in groups, neighbours together and groups as equal as can be.

    Args:
        ranks: how many there are, at least 1.
        share: see `group_count`.
    """
    groups = group_count(ranks, share)
    found: list[list[int]] = [[] for _ in range(groups)]
    for rank in range(ranks):
        found[rank * groups // ranks].append(rank)
    return found
