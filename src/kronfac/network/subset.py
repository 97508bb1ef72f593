"""Some of the examples of a mini-batch: S₁ and S₂ [MG15 §8].

Passes that can't be divided into their examples, see `division.py`, are used whole. With BatchNorm in
`train()` some of the examples are a mini-batch of their own, normalised by their own statistics, as the
user's smaller mini-batch would be.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from kronfac.curvature.estimate import head_counts
from kronfac.distributed import HERE, Spread
from kronfac.network.division import arrange, division_of, norms_in_training, select
from kronfac.network.learned import Division
from kronfac.network.network import Network
from kronfac.network.program import Batch

NORMALIZED = 64
"""Examples at the least that BatchNorm takes its statistics from."""


def sizes(batch: Batch, *fractions: float, spread: Spread = HERE) -> list[int]:
    """⌈τ m⌉ for every fraction τ, m the examples on all ranks."""
    examples = batch.examples + spread.examples_elsewhere
    # 0.07 · 100 is a little above 7.
    return [math.ceil(fraction * examples - 1e-9) for fraction in fractions]


def subsets(
    network: Network,
    batch: Batch,
    counts: Sequence[int],
    generator: torch.Generator | None,
    spread: Spread = HERE,
) -> list[Batch]:
    """Subsets with these numbers of examples, the smaller ones part of the larger ones.

    Args:
        network: whose passes they are.
        batch: the mini-batch.
        counts: how many examples each shall have; a pass that can't be divided counts as a whole.
        generator: draws them; None for the first ones.
        spread: the rank's place in the mini-batch. Examples are chosen by their number among those of all
            ranks, so that it does not matter how they are spread; where only whole passes can be chosen,
            each rank chooses its part of them.
    """
    batch = arrange(network, batch)
    own_total = batch.examples
    total = own_total + spread.examples_elsewhere
    if min(counts) >= total:
        batch = replace(batch, by_rank=_by_rank(range(total), spread))
        return [batch for _ in counts]
    divisions = [division_of(network, part) for part in batch.passes]
    if norms_in_training(network.model):
        counts = [_share(count, own_total, total) for count in counts]
        spread, total = HERE, own_total
        if len(batch.passes) > 1:  # a few examples of each would have no statistics
            return [_whole_passes(batch, count, generator) for count in counts]
        counts = [max(count, min(NORMALIZED, total)) for count in counts]
    if not _divides(batch, divisions):
        counts = [_share(count, own_total, total) for count in counts]
        return [_whole_passes(batch, count, generator) for count in counts]
    order = None if generator is None else torch.randperm(total, generator=generator)
    found: dict[int, Batch] = {}
    for count in set(counts):
        chosen = range(count) if order is None else order[:count].sort().values
        passes, start, by_rank = [], spread.start, _by_rank(chosen, spread)
        for part, division in zip(batch.passes, divisions, strict=True):
            whole = len(divisions) == 1 and spread.alone
            own = chosen if whole else _between(chosen, start, start + part.examples)
            if len(own) == part.examples:
                passes.append(part)
            elif len(own):
                assert division is not None  # it has several examples
                passes.append(select(part, own, division))
            start += part.examples
        if not passes:
            passes = [select(batch.passes[0], range(1), divisions[0])] if divisions[0] else []
            passes = passes or [batch.passes[0]]
            none = replace(batch, passes=tuple(passes), weightless=True, by_rank=by_rank)
            found[count] = none.scaled(0.0)
            continue
        found[count] = replace(batch, passes=tuple(passes), by_rank=by_rank)
    return [found[count] for count in counts]


def terms_of_examples(network: Network, batch: Batch) -> list[int]:
    """The terms that each example has, of every kind of loss call, in the order of `head_counts`.

    None of them if examples can't be chosen one by one, or differ in their terms.
    """
    if norms_in_training(network.model):
        return []
    batch = arrange(network, batch)
    if not _divides(batch, [division_of(network, part) for part in batch.passes]):
        return []
    found: set[tuple[tuple[object, float], ...]] = set()
    for part in batch.passes:
        counts = head_counts([part]).items()
        found.add(tuple((head, count / max(part.examples, 1)) for head, count in counts))
    if len(found) > 1:
        return []
    (each,) = found
    return [int(n) for _, n in each] if all(n.is_integer() for _, n in each) else []


def _divides(batch: Batch, divisions: Sequence[Division | None]) -> bool:
    """Whether examples can be chosen one by one."""
    return all(
        part.examples <= 1 or (division is not None and division.dim == part.dim)
        for part, division in zip(batch.passes, divisions, strict=True)
    )


def _by_rank(chosen: Tensor | range, spread: Spread) -> tuple[int, ...]:
    """How many of the chosen examples every rank has."""
    if spread.alone:
        return ()
    if isinstance(chosen, range):
        places = [min(start, chosen.stop) for start in spread.starts]
    else:
        places = torch.searchsorted(chosen, torch.tensor(spread.starts)).tolist()
    return tuple(stop - start for start, stop in pairwise(places))


def _share(count: int, own: int, total: int) -> int:
    """A rank's part of so many examples."""
    return -(-count * own // total)


def _between(chosen: Tensor | range, start: int, stop: int) -> Tensor | range:
    """Those of the chosen examples that belong to a pass, counted from its first one."""
    if isinstance(chosen, range):
        return range(min(max(chosen.stop - start, 0), stop - start))  # the first ones
    return chosen[(chosen >= start) & (chosen < stop)] - start


def _whole_passes(batch: Batch, count: int, generator: torch.Generator | None) -> Batch:
    """Whole passes with at least `count` examples."""
    number = len(batch.passes)
    order = (
        range(number) if generator is None else torch.randperm(number, generator=generator).tolist()
    )
    chosen: list[int] = []
    for n in order:
        if sum(batch.passes[i].examples for i in chosen) < count:
            chosen.append(n)
    return replace(batch, passes=tuple(batch.passes[n] for n in sorted(chosen)))
