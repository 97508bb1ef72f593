"""The moments of all units on the examples S₁: forward passes, and backward passes from vectors [MG15 §5].

A backward pass starts from a vector r in the space of the outputs, with E[r rᵀ] = s w F_R for every term.
The blocks receive the inputs ā and the gradients g = ∂(rᵀz)/∂s of every use.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor

from kronfac.curvature.block import Average, Block, Moments, Product, Summands
from kronfac.curvature.fisher import Fisher, Outputs
from kronfac.curvature.inverse import Curvature, InverseUpdate, Link
from kronfac.curvature.kronecker import KroneckerBlock, uses_of
from kronfac.curvature.taps import Rows, SummedGradient, Tap, Taps
from kronfac.distributed import ALONE, World
from kronfac.objective import Terms

CEILING = 0.95
"""The largest decay of the moving averages in the paper: they remember 20 iterations [MG15 §5]."""


def ema_decay(iteration: int, ceiling: float | None = None, memory: float = 1.0) -> float:
    """ε = min(1 − 1/k, ceiling) [MG15 §5]: a plain average at first, then an exponential one.

    The default ceiling is the paper's, or 1 − 1/`memory` if momentum remembers more steps than that.
    """
    if ceiling is None:
        ceiling = max(CEILING, 1 - 1 / memory)
    return min(1 - 1 / iteration, ceiling)


class Examples(Protocol):
    """A micro-batch, as far as `estimate` reads it."""

    @property
    def examples(self) -> int:
        """How many there are."""

    @property
    def terms(self) -> Sequence[Terms]:
        """The terms of every loss call."""

    @property
    def apart(self) -> bool:
        """Whether every example has the same number of terms, one after the other."""


class Tapped(Protocol):
    """The network around θ on a micro-batch."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """z of every loss call, (terms, event), without a graph."""

    @property
    def summed(self) -> bool:
        """Whether for some units only the gradient summed over the examples is known."""

    def taps(self, vectors: Sequence[Tensor | None]) -> Sequence[Taps]:
        """The taps of every unit for rᵀf, one r for each loss call; None stands for r = 0."""


@dataclass(frozen=True)
class Sample:
    """The examples S₁, and how to make passes over them."""

    passes: Sequence[Examples]
    linearize: Callable[[Examples], Tapped]
    factor: float = 1.0
    """The weight of the terms: the number of examples in the mini-batch over that in S₁."""
    nothing: Callable[[int], Taps] = lambda unit: []
    """Taps of zeros for a unit that no example uses."""
    weightless: bool = False
    """Whether this rank has no example of S₁, and makes its passes over one of weight 0."""
    padded: bool = True
    """Whether some terms may have the weight 0."""
    world: World = ALONE
    """The ranks that each have a part of S₁."""
    total: int | None = None
    """Number of examples of S₁ on all ranks; None if this rank has all of them."""
    start: int = 0
    """Number of examples of S₁ on the ranks before this one."""
    heads: Sequence[tuple[int, int]] | None = None
    """The number of terms on all ranks and on the ranks before this one, for every kind of loss call in the
    order of the calls."""

    @property
    def examples(self) -> int:
        """The number of examples on all ranks."""
        return sum(p.examples for p in self.passes) if self.total is None else self.total

    def head(self, number: int, own: int) -> tuple[int, int]:
        """The number of terms of a kind of loss call on all ranks, and on the ranks before this one."""
        if self.heads is None:
            return own, 0
        total, before = self.heads[number]
        return total, 0 if self.weightless else before


def estimate(
    sample: Sample,
    blocks: Sequence[Block],
    fisher: Fisher,
    generator: torch.Generator,
    *,
    links: Sequence[bool] = (),
    old: Curvature | None = None,
    decay: float = 0.0,
    update: InverseUpdate | None = None,
) -> Curvature:
    """Estimate the curvature on S₁, and average it into `old` with weight 1 − decay.

    Args:
        sample: S₁.
        blocks: the block of each unit.
        fisher: where the vectors come from.
        generator: for random numbers.
        links: whether each unit and the next are neighbours in a chain whose cross moments are wanted.
        old: the moving average so far.
        decay: ε.
        update: that of the inverse in use, which receives the same taps.
    """
    if old is not None and len(old.blocks) != len(blocks):
        raise ValueError(
            f"The moving average needs the network's {len(blocks)} units; got {len(old.blocks)} units."
        )
    known = [_old(block, old, n) for n, block in enumerate(blocks)]
    averages = [block.average(own, decay) for block, own in zip(blocks, known, strict=True)]
    chains = Chains(blocks, links, old, decay)
    met = [False] * len(blocks)
    seed: int | None = None
    summed, divided = _SummedGradients(), sample.world.size > 1 or len(sample.passes) > 1
    for visit in _visits(sample, fisher, generator):
        part, view = visit.part, visit.view
        scale = part.terms[0].scale or 1.0
        weight = scale * sample.factor / fisher.draws
        each = 0.0 if sample.weightless else 1.0
        # Places are left out only if one vector has all terms, and no chain needs equal rows of two units.
        padded = sample.padded and fisher.independent and not any(links)
        padded = padded and any(map(_has_padding, part.terms))
        signed = not fisher.independent and view.summed
        if signed and seed is None:
            # On all ranks, so that their streams stay equal.
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        for number, vectors in enumerate(fisher.vectors(visit.outputs)):
            if signed and seed is not None and not sample.weightless:
                vectors = visit.with_signs(vectors, number, seed, sample.examples)  # noqa: PLW2901
            weighed = [
                None if v is None else terms.weigh_by_root(v, scale)
                for terms, v in zip(part.terms, vectors, strict=True)
            ]
            taps = view.taps(weighed)
            taps = [_without_padding(unit) for unit in taps] if padded else taps
            for n, (average, unit) in enumerate(zip(averages, taps, strict=True)):
                if divided and isinstance(unit, SummedGradient):
                    summed.add(n, number, unit.V, weight)
                elif isinstance(unit, SummedGradient) or unit:
                    average.add(unit, each, weight)
                    met[n] = True
            chains.add(taps, each, weight)
            if update is not None:
                update.add(taps, weight)
            each = 0.0
    summed.add_to(averages, met, sample.world)
    ranks = sample.world.size > 1
    for n, average in enumerate(averages):
        if not met[n] and (ranks or known[n] is None):
            average.add(sample.nothing(n), 0.0, 0.0)
    if ranks:
        summands = [*averages, chains, *([] if update is None else [update])]
        met = _sum_over_ranks(sample.world, summands, met)
    moments = tuple(
        average.value() if used or before is None else before
        for average, before, used in zip(averages, known, met, strict=True)
    )
    return Curvature(moments, chains.value(), _examples(sample.examples, old, decay))


def _sum_over_ranks(world: World, summands: Sequence[Summands], met: list[bool]) -> list[bool]:
    """Sum the statistics over the ranks; return for each unit whether any rank has used it."""
    counts = [summand.counts() for summand in summands]
    totals = world.total([*map(float, met), *(n for own in counts for n in own)], "statistics")
    rest = iter(totals[len(met) :])
    parts = [
        part
        for own, summand in zip(counts, summands, strict=True)
        for part in summand.parts([next(rest) for _ in own])
    ]
    world.sum([V for V, _ in parts], "statistics", symmetric=[symmetric for _, symmetric in parts])
    return [ranks > 0 for ranks in totals[: len(met)]]


class Chains(Summands):
    """Moving averages of the cross moments of neighbouring units."""

    def __init__(
        self, blocks: Sequence[Block], links: Sequence[bool], old: Curvature | None, decay: float
    ) -> None:
        known = old.links if old is not None and old.links else [None] * len(links)
        self._blocks = blocks
        self._pairs: list[tuple[Product, Product] | None] = []
        for linked, link in zip(links, known, strict=True):
            sides = (None, None) if link is None else (link.A_next, link.G_next)
            A_next, G_next = (Product(side, decay) for side in sides)
            self._pairs.append((A_next, G_next) if linked else None)
        self.products = [side for pair in self._pairs if pair is not None for side in pair]

    def add(self, taps: Sequence[Taps], each: float, weight: float) -> None:
        """Add the statistics of one backward pass."""
        if not self.products:
            return
        rows = [self._rows(i, unit) for i, unit in enumerate(taps)]
        for pair, (this, following) in zip(self._pairs, pairwise(rows), strict=True):
            if pair is not None and this is not None and following is not None:
                pair[0].add_to_mean([this[0]], [following[0]], each)
                pair[1].add(this[1], following[1], weight)

    def _rows(self, number: int, taps: Taps) -> tuple[Rows, Tensor] | None:
        block = self._blocks[number]
        if isinstance(taps, SummedGradient) or not taps or not isinstance(block, KroneckerBlock):
            return None
        a, g = block.vectors(uses_of(taps))
        return a[0], g[0]

    def value(self) -> tuple[Link | None, ...]:
        """The averages with everything that was added."""
        return tuple(
            None if pair is None else Link(pair[0].value(), pair[1].value()) for pair in self._pairs
        )


def _has_padding(terms: Terms) -> bool:
    return terms.weight is not None and bool((terms.weight == 0).any())


def _without_padding(taps: Taps) -> Taps:
    """The taps without the places that no term depends on, which would only dilute A."""
    if isinstance(taps, SummedGradient):
        return taps
    return [
        replace(tap, counts=(tap.grads != 0).any(dim=-1)) if isinstance(tap, Tap) else tap
        for tap in taps
    ]


def _old(block: Block, old: Curvature | None, number: int) -> Moments | None:
    """The old moments of a unit; None if the unit had another block."""
    moments = None if old is None else old.blocks[number]
    return moments if isinstance(moments, block.moments) else None


def _examples(new: int, old: Curvature | None, decay: float) -> float:
    """How many examples of equal weight would estimate the curvature as accurately as the average does."""
    if old is None:
        return float(new)
    return 1 / ((1 - decay) ** 2 / new + decay**2 / old.examples)


class _SummedGradients:
    """√w V for units of which only V = Σ_n g_n is known: per vector, summed over passes and ranks.

    V² is an unbiased estimate of Σ_n g_n² if products of different examples vanish on average. They do if
    targets are drawn for each term, or if each example has a random sign.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor]] = defaultdict(list)

    def add(self, unit: int, vector: int, V: Tensor, weight: float) -> None:
        """Add the gradient of a unit in one pass; V² has this weight."""
        held, scaled = self._held[unit], V * abs(weight) ** 0.5
        if vector < len(held):
            held[vector] = held[vector] + scaled
        else:
            held.append(scaled)

    def add_to(self, averages: Sequence[Average], met: list[bool], world: World) -> None:
        """Add the squares to the averages of rank 0, and mark the units as met."""
        units = sorted(self._held)
        if units and world.size > 1:
            rows = world.gather([float(len(self._held[n])) for n in units], "statistics")
            for n, lengths in zip(units, zip(*rows, strict=True), strict=True):
                held = self._held[n]  # an example may have less outputs on one rank than on another
                held += [torch.zeros_like(held[0]) for _ in range(int(max(lengths)) - len(held))]
            world.sum([V for n in units for V in self._held[n]], "statistics")
        for n in units if world.rank == 0 else ():
            met[n] = True
            for V in self._held[n]:
                averages[n].add(SummedGradient(V), 0.0, 1.0)


@dataclass(frozen=True)
class _Visit:
    """A pass over some of the examples, with its random numbers."""

    part: Examples
    view: Tapped
    outputs: list[Outputs]
    start: int
    """The number of its first example among those of all ranks."""
    terms: list[tuple[int, int]]
    """For every loss call, the number of terms on all ranks, and that of its first term among them."""

    def with_signs(
        self, vectors: Sequence[Tensor | None], number: int, seed: int, examples: int
    ) -> list[Tensor | None]:
        """Multiply the vectors by a random sign per example, or per term if terms belong to no example."""
        own = self.part.examples
        signed: list[Tensor | None] = []
        for call, (v, (total, start)) in enumerate(zip(vectors, self.terms, strict=True)):
            if v is not None:
                whole = self.part.apart and len(v) % own == 0
                place = (own, self.start, examples) if whole else (len(v), start, total)
                # A seed for each vector and call: ranks may have different numbers of vectors.
                v = _with_signs(v, seed + number * len(vectors) + call, *place)  # noqa: PLW2901
            signed.append(v)
        return signed


def _with_signs(v: Tensor, seed: int, count: int, start: int, total: int) -> Tensor:
    """Vectors (terms, event) of `count` of all ranks' `total` examples, each with a random sign."""
    generator = torch.Generator(v.device).manual_seed(seed)
    bits = torch.randint(2, (total,), generator=generator, device=v.device)[start : start + count]
    signs = (2 * bits - 1).to(v.dtype)
    return v * signs.repeat_interleave(len(v) // count).unsqueeze(-1)


def _visits(sample: Sample, fisher: Fisher, generator: torch.Generator) -> Iterator[_Visit]:
    """Every pass with its random numbers, the same for any division into passes and ranks."""
    counts = head_counts(sample.passes)
    places = {head: sample.head(n, own) for n, (head, own) in enumerate(counts.items())}
    drawn: dict[object, Tensor | None] = {}
    first = sample.start
    for part in sample.passes:
        view = sample.linearize(part)
        outputs, numbers = [], []
        for j, (terms, z) in enumerate(zip(part.terms, view.outputs, strict=True)):
            head = _head(j, terms)
            total, start = places[head]
            if head not in drawn:
                drawn[head] = fisher.noise(terms, total, z, generator)
            noise, stop = drawn[head], start + terms.count
            if noise is not None and stop > total:  # a weightless rank: any numbers will do
                noise = noise[:, torch.arange(terms.count, device=z.device) % total]
            elif noise is not None:
                noise = noise[:, start:stop]
            apart = max(terms.count // max(part.examples, 1), 1) if part.apart else 1
            outputs.append(Outputs(terms, z, noise, apart))
            numbers.append(places[head])
            places[head] = total, stop
        yield _Visit(part, view, outputs, first, numbers)
        first += part.examples


def head_counts(passes: Sequence[Examples]) -> dict[object, int]:
    """The number of terms of every kind of loss call, in the order of the calls."""
    counts: dict[object, int] = defaultdict(int)
    for part in passes:
        for j, terms in enumerate(part.terms):
            counts[_head(j, terms)] += terms.count
    return counts


def _head(number: int, terms: Terms) -> object:
    """The kind of a loss call. Calls of one kind in different passes share a stream of random numbers."""
    return number, type(terms.likelihood), terms.event
