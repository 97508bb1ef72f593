"""Some of the examples of a mini-batch: S₁ and S₂ [MG15 §8].

Passes whose examples can't be taken apart, see `examples.py`, are used whole. With BatchNorm in
`train()` some of the examples are a mini-batch of their own, normalised by their own statistics, as the
user's smaller mini-batch would be.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kronfac.model.network import Network
from kronfac.record.batch import Batch
from kronfac.record.examples import norms_in_training, select

NORMALIZED = 64
"""Examples at the least that BatchNorm takes its statistics from."""


def sizes(examples: int, *fractions: float) -> list[int]:
    """⌈τ m⌉ for every fraction τ of m examples."""
    # 0.07 · 100 is a little above 7.
    return [math.ceil(fraction * examples - 1e-9) for fraction in fractions]


def subsets(
    network: Network,
    batch: Batch,
    counts: Sequence[int],
    generator: torch.Generator | None,
    *,
    start: int = 0,
    total: int | None = None,
) -> list[Batch]:
    """Subsets with these numbers of examples, the smaller ones part of the larger ones.

    With several processes, each has a part of the mini-batch. Examples are chosen by their number in the
    whole, so that the choice does not depend on how they are divided; if only whole passes can be chosen,
    each process chooses some of its own.

    Args:
        network: whose passes they are.
        batch: this process's part of the mini-batch.
        counts: how many examples each shall have; a pass that can't be divided counts as a whole.
        generator: draws them; None for the first ones.
        start: the number of its first example in the whole.
        total: examples of the whole; None if `batch` has all.
    """
    own_total = batch.examples
    total = own_total if total is None else total
    if min(counts) >= total:
        return [batch for _ in counts]
    if norms_in_training(network.model):
        counts = [_share(count, own_total, total) for count in counts]
        start, total = 0, own_total
        if len(batch.passes) > 1:  # a few examples of each would have no statistics
            return [_whole_passes(batch, count, generator) for count in counts]
        counts = [max(count, min(NORMALIZED, total)) for count in counts]
    if not _apart(batch):
        counts = [_share(count, own_total, total) for count in counts]
        return [_whole_passes(batch, count, generator) for count in counts]
    order = None if generator is None else torch.randperm(total, generator=generator)
    found: dict[int, Batch] = {}
    for count in set(counts):
        chosen = range(count) if order is None else order[:count].sort().values
        passes, first = [], start
        for part in batch.passes:
            whole = len(batch.passes) == 1 and total == own_total
            own = chosen if whole else _between(chosen, first, first + part.examples)
            if len(own) == part.examples:
                passes.append(part)
            elif len(own):
                passes.append(select(part, own))
            first += part.examples
        if not passes:
            one = select(batch.passes[0], range(1))
            none = replace(batch, passes=(one,), weightless=True)
            found[count] = none.scaled(0.0)
            continue
        found[count] = replace(batch, passes=tuple(passes))
    return [found[count] for count in counts]


def _apart(batch: Batch) -> bool:
    """Whether examples can be chosen one by one."""
    return all(part.apart for part in batch.passes)


def _share(count: int, own: int, total: int) -> int:
    """A rank's part of so many examples."""
    return -(-count * own // total)


def _between(chosen: Tensor | range, start: int, stop: int) -> Tensor | range:
    """The chosen examples of one pass, counted from its first one."""
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
