"""The moments of all units on the examples S₁: forward passes, and backward passes from vectors [MG15 §5].

Each term enters as a vector r in output space with E[r rᵀ] = s w F_R. What it becomes at the outputs of
every use is what the blocks see.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from kronfac.curvature.block import Average, Block, Moments, blend
from kronfac.curvature.fisher import Draws, Fisher, Outputs, child_seed, draw_seed
from kronfac.curvature.inverse import InverseUpdate
from kronfac.curvature.moments import Chains, Curvature, Link
from kronfac.curvature.taps import SummedGradient, Tap, Taps
from kronfac.distributed import ALONE, World
from kronfac.objective import Terms


class Examples(Protocol):
    """A micro-batch."""

    @property
    def examples(self) -> int:
        """How many there are."""
        ...

    @property
    def terms(self) -> Sequence[Terms]:
        """The terms of every loss call."""
        ...

    @property
    def apart(self) -> bool:
        """Whether terms belong to examples, those of one after the other; else each counts alone."""
        ...


class Tapped(Protocol):
    """The network around θ on a micro-batch."""

    @property
    def outputs(self) -> Sequence[Tensor]:
        """z of every loss call, (terms, event)."""
        ...

    @property
    def summed(self) -> bool:
        """Whether some units show their gradient summed over the examples, and no more."""
        ...

    def taps(self, vectors: Sequence[Tensor | None]) -> Sequence[Taps]:
        """What every unit shows for rᵀf, one r for each loss call."""
        ...


@dataclass(frozen=True)
class Sample:
    """S₁, and how to go through it."""

    passes: Sequence[Examples]
    linearize: Callable[[Examples], Tapped]
    factor: float = 1.0
    """What the terms count: examples of the whole mini-batch over those of S₁."""
    nothing: Callable[[int], Taps] = lambda unit: []
    """What a unit shows that none of the examples uses: zeros."""
    weightless: bool = False
    """Whether this rank has none of S₁: its passes are of an example that counts nothing."""
    world: World = ALONE
    """The ranks that each have a part of S₁."""
    total: int | None = None
    """Examples of S₁ on all ranks; None if this one has all."""
    start: int = 0
    """Examples of S₁ on the ranks before this one."""
    heads: Sequence[tuple[int, int]] | None = None
    """For every kind of loss call, in the order in which they come: terms on all ranks, and on those before
    this one."""

    @property
    def examples(self) -> int:
        """How many there are, on all ranks."""
        if self.total is not None:
            return self.total
        return sum(part.examples for part in self.passes)

    def head(self, number: int, own: int) -> tuple[int, int]:
        """Terms of a kind of loss call on all ranks, and how many of them are those of ranks before."""
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
    """The curvature on S₁, averaged into `old` with weight 1 − decay.

    Args:
        sample: S₁.
        blocks: of the units.
        fisher: where the vectors come from.
        generator: for random numbers.
        links: whether each unit and the next are neighbours in a chain whose cross moments are wanted.
        old: the moving average so far.
        decay: ε.
        update: of the inverse in use, which is shown the same taps.
    """
    if old is not None and len(old.blocks) != len(blocks):
        raise ValueError(
            f"The moving average is of {len(old.blocks)} units, the network has {len(blocks)}."
        )
    alone = sample.world.size == 1
    # The old averages are the same on all ranks: they enter once, after the sum over the ranks.
    averages = [
        block.average(_old(block, old, i), decay) if alone else block.average(None, 0.0)
        for i, block in enumerate(blocks)
    ]
    chains = Chains(blocks, links, old, decay) if alone else Chains(blocks, links, None, 0.0)
    total = sample.examples
    met = [False] * len(blocks)
    signs: _Signs | None = None
    summed, divided = _SummedGradients(), not alone or len(sample.passes) > 1
    for visit in _visits(sample, fisher, generator):
        part, view, noise = visit.part, visit.view, visit.noise
        first, share = True, 0.0 if sample.weightless else part.examples / total
        scale = part.terms[0].scale or 1.0
        weight = scale * sample.factor / fisher.draws
        outputs = [
            Outputs(
                terms,
                z,
                draws,
                max(terms.count // max(part.examples, 1), 1) if part.apart else 1,
            )
            for terms, z, draws in zip(part.terms, view.outputs, noise, strict=True)
        ]
        # From one vector for all terms; and neighbours in a chain need the same rows.
        padded = fisher.independent and not any(links) and any(map(_has_padding, part.terms))
        if not fisher.independent and view.summed:
            signs = signs or _Signs(generator)  # on all ranks, so that their streams stay alike
        for number, vectors in enumerate(fisher.vectors(outputs)):
            if signs is not None and view.summed and not sample.weightless:
                vectors = visit.with_signs(vectors, number, signs, total)  # noqa: PLW2901
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
                    average.add(unit, first, share, weight)
                    met[n] = True
            chains.add(taps, first, share, weight)
            if update is not None:
                update.add(taps, weight)
            first = False
    summed.add_to(averages, met, sample.world)
    for n, average in enumerate(averages):
        if not met[n] and (not alone or _old(blocks[n], old, n) is None):
            average.add(sample.nothing(n), True, 1.0 if alone else 0.0, 0.0)
    if alone:
        moments = tuple(average.value() for average in averages)
        return Curvature(moments, chains.value(), _examples(total, old, decay))
    used = _sum_over_ranks(sample.world, averages, met, chains, update)
    moments = tuple(
        _blended(average, _old(block, old, n), decay, n in used)
        for n, (block, average) in enumerate(zip(blocks, averages, strict=True))
    )
    linked = _blended_links(chains.value(), old, decay)
    return Curvature(moments, linked, _examples(total, old, decay))


def _sum_over_ranks(
    world: World,
    averages: Sequence[Average],
    met: Sequence[bool],
    chains: Chains,
    update: InverseUpdate | None,
) -> set[int]:
    """Sum the statistics over the ranks; return the numbers of the units that any rank has used."""
    for average in averages:
        average.count_by_vector()
    counts = [average.counts() for average in averages]
    totals = world.total([*map(float, met), *(n for own in counts for n in own)], "statistics")
    start = len(met)
    for own, average in zip(counts, averages, strict=True):
        if own and any(totals[start : start + len(own)]):
            average.recount(totals[start : start + len(own)])
        start += len(own)
    parts = [part for average in averages for part in average.parts()] + chains.parts()
    parts += [] if update is None else update.parts()
    world.sum([V for V, _ in parts], "statistics", symmetric=[symmetric for _, symmetric in parts])
    return {n for n, ranks in enumerate(totals[: len(met)]) if ranks}


def _blended(average: Average, old: Moments | None, decay: float, used: bool) -> Moments:
    """The moving average of a unit; as it was if no rank has used it."""
    if old is not None and not used:
        return old
    if not used:
        average.recount([float(n == 0) for n, _ in enumerate(average.counts())])
    return blend(old, average.value(), decay)


def _blended_links(
    new: tuple[Link | None, ...], old: Curvature | None, decay: float
) -> tuple[Link | None, ...]:
    """The moving averages of cross moments."""
    if old is None or not old.links or decay == 0:
        return new
    return tuple(
        link
        if link is None or before is None
        else Link(
            torch.lerp(link.A_next, before.A_next, decay),
            torch.lerp(link.G_next, before.G_next, decay),
        )
        for link, before in zip(new, old.links, strict=True)
    )


def _has_padding(terms: Terms) -> bool:
    return terms.weight is not None and bool((terms.weight == 0).any())


def _without_padding(taps: Taps) -> Taps:
    """The taps without places that no term of the loss depends on, which would only dilute A."""
    if isinstance(taps, SummedGradient):
        return taps
    return [
        replace(tap, counts=(tap.grads != 0).any(dim=-1)) if isinstance(tap, Tap) else tap
        for tap in taps
    ]


def _old(block: Block, old: Curvature | None, number: int) -> Moments | None:
    """The moments so far, unless the unit has had another block."""
    moments = None if old is None else old.blocks[number]
    return moments if isinstance(moments, block.moments) else None


def _examples(new: int, old: Curvature | None, decay: float) -> float:
    """How many examples of equal weight are as sure an estimate as the moving average is."""
    if old is None:
        return float(new)
    return 1 / ((1 - decay) ** 2 / new + decay**2 / old.examples)


class _SummedGradients:
    """√w V of units that show only V = Σ_n g_n, one for every vector, summed over passes and ranks.

    V² is unbiased if products of different examples vanish on average: if targets are drawn for each term,
    or by a random sign for every example.
    """

    def __init__(self) -> None:
        self._held: dict[int, list[Tensor]] = defaultdict(list)

    def add(self, unit: int, vector: int, V: Tensor, weight: float) -> None:
        """Add the gradient of a unit in one pass; V² counts `weight`."""
        held, scaled = self._held[unit], V * abs(weight) ** 0.5
        if vector < len(held):
            held[vector] = held[vector] + scaled
        else:
            held.append(scaled)

    def add_to(self, averages: Sequence[Average], met: list[bool], world: World) -> None:
        """Add what all passes and ranks have shown to the averages, and note that these were met."""
        for n, V in self.total(world):
            averages[n].add(SummedGradient(V), not met[n], 1.0, 1.0)
            met[n] = True

    def total(self, world: World) -> list[tuple[int, Tensor]]:
        """Units and their gradients, of all passes and ranks; on rank 0 alone."""
        units = sorted(self._held)
        if units and world.size > 1:
            rows = world.gather([float(len(self._held[n])) for n in units], "statistics")
            for n, lengths in zip(units, zip(*rows, strict=True), strict=True):
                held = self._held[n]  # an example may have less outputs on one rank than on another
                held += [torch.zeros_like(held[0]) for _ in range(int(max(lengths)) - len(held))]
            world.sum([V for n in units for V in self._held[n]], "statistics")
        return [(n, V) for n in units for V in self._held[n]] if world.rank == 0 else []


class _Signs:
    """A random sign for every example and vector, by the number of the example among those of all ranks."""

    def __init__(self, generator: torch.Generator) -> None:
        self._seed, self._device = draw_seed(generator), generator.device

    def times(
        self,
        vectors: Tensor,
        key: tuple[int, int],
        place: tuple[int, int, int],
    ) -> Tensor:
        """The vectors, with their signs.

        Args:
            vectors: of the terms of some examples, (terms, event).
            key: the numbers of the vector and of the loss call.
            place: how many examples these are, how many all ranks have, and the number of the first.
        """
        count, total, start = place
        seed = child_seed(child_seed(self._seed, key[0]), key[1])
        generator = torch.Generator(self._device).manual_seed(seed)
        draws = Draws(self._draw, total, generator).between(start, start + count)
        assert draws is not None
        drawn, each = (2 * draws[0] - 1).to(vectors.dtype), len(vectors) // count
        return vectors * drawn.repeat_interleave(each).unsqueeze(-1)

    def _draw(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randint(2, (1, count), generator=generator, device=self._device)


@dataclass(frozen=True)
class _Visit:
    """A pass, with what it gets of the numbers that are drawn."""

    part: Examples
    view: Tapped
    noise: list[Tensor | None]
    start: int
    """The number of its first example, among those of all ranks."""
    terms: list[tuple[int, int]]
    """For every loss call, the terms on all ranks, and the number of the first."""

    def with_signs(
        self, vectors: Sequence[Tensor | None], number: int, signs: _Signs, examples: int
    ) -> list[Tensor | None]:
        """The vectors with random signs: of every example, or of every term if they can't be told apart."""
        own = self.part.examples
        signed: list[Tensor | None] = []
        for call, (v, (total, start)) in enumerate(zip(vectors, self.terms, strict=True)):
            if v is None:
                signed.append(None)
                continue
            whole = self.part.apart and len(v) % own == 0
            place = (own, examples, self.start) if whole else (len(v), total, start)
            signed.append(signs.times(v, (number, call), place))
        return signed


def _visits(sample: Sample, fisher: Fisher, generator: torch.Generator) -> Iterator[_Visit]:
    """Every pass with its random numbers, which neither chunks nor ranks make a difference to."""
    counts = head_counts(sample.passes)
    places = {head: sample.head(n, own) for n, (head, own) in enumerate(counts.items())}
    drawn: dict[object, Draws] = {}
    first = sample.start
    for part in sample.passes:
        view = sample.linearize(part)
        noise: list[Tensor | None] = []
        numbers = []
        for j, (terms, z) in enumerate(zip(part.terms, view.outputs, strict=True)):
            head = _head(j, terms)
            total, start = places[head]
            if head not in drawn:
                drawn[head] = Draws(_noise_of(fisher, terms, z), total, generator)
            stop = start + terms.count
            draws = drawn[head].between(start, min(stop, total))
            if draws is not None and stop > total:  # of no example: any numbers will do
                draws = draws[:, torch.arange(terms.count, device=z.device) % total]
            noise.append(draws)
            numbers.append(places[head])
            places[head] = total, stop
        yield _Visit(part, view, noise, first, numbers)
        first += part.examples


def _noise_of(
    fisher: Fisher, terms: Terms, z: Tensor
) -> Callable[[int, torch.Generator], Tensor | None]:
    like = z.new_empty(0)  # which is kept until all passes are done
    return lambda count, generator: fisher.noise(terms, count, like, generator)


def head_counts(passes: Sequence[Examples]) -> dict[object, int]:
    """The terms of every kind of loss call, in the order in which they come."""
    counts: dict[object, int] = defaultdict(int)
    for part in passes:
        for j, terms in enumerate(part.terms):
            counts[_head(j, terms)] += terms.count
    return counts


def _head(number: int, terms: Terms) -> object:
    """What loss calls have in common that draw alike: passes may be about different losses."""
    return number, type(terms.likelihood), terms.event
