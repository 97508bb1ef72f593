"""Statistics of one step, summed over the ranks, and then averaged with the old ones."""

from collections.abc import Callable, Sequence

import torch

from kronfac.curvature.base import Average, Moments, blend
from kronfac.curvature.cross_moments import Chains
from kronfac.curvature.curvature import Curvature, Link
from kronfac.curvature.inverse import InverseUpdate
from kronfac.distributed import Packed, Part, Phase, Ranks


def start_sum(
    world: Ranks,
    averages: Sequence[Average],
    met: Sequence[bool],
    chains: Chains,
    update: InverseUpdate | None,
) -> Callable[[], set[int]]:
    """Start to sum what the ranks have seen.

    Returns:
        What waits for the sums and takes them over in place; it gives the numbers of the units that any
        rank has used.
    """
    for average in averages:
        average.count_by_vector()
    parts = _parts(averages, chains, update)
    packed = Packed(parts)
    reduction = world.prepare(packed.flats)
    counts = [average.counts() for average in averages]
    numbers = [float(used) for used in met] + [count for own in counts for count in own]
    totals = world.total(Phase.STATISTICS, numbers)
    start = len(met)
    for own, average in zip(counts, averages, strict=True):
        if own and any(totals[start : start + len(own)]):
            average.recount(totals[start : start + len(own)])
        start += len(own)
    now = _parts(averages, chains, update)
    if [part.tensor.shape for part in now] != [part.tensor.shape for part in parts]:
        # The others use a unit the other way round: here it is zeros, in memory of another shape.
        packed = Packed(now)
        reduction = world.prepare(packed.flats)
    reduction.start()

    def finish() -> set[int]:
        reduction.wait()
        packed.unpack()
        return {n for n, ranks in enumerate(totals[: len(met)]) if ranks}

    return finish


def _parts(averages: Sequence[Average], chains: Chains, update: InverseUpdate | None) -> list[Part]:
    parts = [part for average in averages for part in average.parts()] + chains.parts()
    return parts if update is None else parts + update.parts()


def blended(average: Average, old: Moments | None, decay: float, used: bool) -> Moments:
    """The moving average of a unit; as it was if no rank has used it."""
    if old is not None and not used:
        return old
    if not used:
        average.recount([1.0 for _ in average.counts()][:1] + [0.0 for _ in average.counts()][1:])
    return blend(old, average.value(), decay)


def blended_links(
    new: tuple[Link | None, ...], old: Curvature | None, decay: float
) -> tuple[Link | None, ...]:
    """The moving averages of cross moments."""
    if old is None or not old.links or decay == 0:
        return new
    pairs = zip(new, old.links, strict=True)
    return tuple(
        link
        if link is None or before is None
        else Link(
            torch.lerp(link.A_next, before.A_next, decay),
            torch.lerp(link.G_next, before.G_next, decay),
        )
        for link, before in pairs
    )
