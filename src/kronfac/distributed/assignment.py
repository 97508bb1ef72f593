"""Assignment of work to ranks by cost, the same on every rank without a message."""

from collections.abc import Sequence
from heapq import heapify, heapreplace


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Assign pieces of work greedily: the most expensive first, each to the least-loaded rank.

    The largest load is at most (4/3 − 1/(3 ranks)) times that of the best assignment (Graham 1969, LPT).
    Of equal costs the earlier piece goes first, of equal loads the lower rank.
    """
    found = [0] * len(costs)
    loads = [(0.0, rank) for rank in range(ranks)]
    heapify(loads)
    for piece in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        load, rank = loads[0]
        found[piece] = rank
        heapreplace(loads, (load + costs[piece], rank))
    return found
