"""The curvature of a step: the examples that it is taken on, and the moving averages [MG15 §5, §8]."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from kronfac.control import Measurement
from kronfac.curvature import Curvature, ema_decay
from kronfac.curvature.estimate import Sample, begin_estimate, head_counts
from kronfac.distributed import Phase, Place, Ranks, Spread
from kronfac.errors import RankError
from kronfac.evaluation import Evaluation
from kronfac.later import Later
from kronfac.linearization import Linearizer, can_be_explicit
from kronfac.network import Batch, Pass, sizes, subsets
from kronfac.settings import Settings
from kronfac.state import CurrentInverse, State

SUBSET_SEEDS = 1_000_003
"""Iterations until the seeds of the subsets repeat those of another seed."""


@dataclass(frozen=True)
class CurvatureExamples:
    """The examples that the curvature of a step is taken on."""

    statistics: Batch
    """S₁."""
    fisher: Batch
    """S₂."""
    around: Linearizer
    """How passes over them are made."""
    place: Place | None = None
    """Where they stand among those of all ranks; None in one process."""


def curvature_examples(
    settings: Settings, evaluation: Evaluation, m: Measurement, wholly: bool = False
) -> CurvatureExamples:
    """S₁ ⊂ S₂: drawn anew in every step, or the first examples [§8].

    All examples if M is to be minimised over all directions.
    """
    batch, spread = evaluation.batch, evaluation.spread
    if wholly:
        S1, S2 = subsets(evaluation.network, batch, sizes(batch, 1.0, 1.0), None)
        return CurvatureExamples(S1, S2, Linearizer(evaluation.network, keeps=True))
    terms = batch.most_terms + spread.terms_elsewhere
    fractions = settings.shares(m.examples, terms, convolutional=evaluation.network.convolutional)
    if batch.random and not batch.traced:
        # Statistics and J v have to see the same masks, which depend on the examples of a pass.
        fractions = fractions[1], fractions[1]
    explicit = spread.explicit and can_be_explicit(evaluation.network, batch)
    if explicit and settings.statistics_fraction is None:
        # J v is then a by-product of the statistics, if they are of the same examples.
        fractions = fractions[1], fractions[1]
    generator = None
    if not settings.first_examples:
        # A generator of its own, so that the targets' stream stays as it is; no state to be saved.
        generator = torch.Generator().manual_seed(SUBSET_SEEDS * settings.fisher.seed + m.iteration)
    counts = sizes(batch, *fractions, spread=spread)
    S1, S2 = subsets(evaluation.network, batch, counts, generator, spread)
    around = Linearizer(evaluation.network, keeps=explicit and S1 is S2)
    return CurvatureExamples(S1, S2, around, find_place(spread, S1, S2))


def find_place(spread: Spread, S1: Batch, S2: Batch) -> Place | None:
    """Where this rank's examples stand among those of all ranks; None in one process.

    If every example has as many terms, that follows from the numbers of the examples that were chosen.
    """
    world = spread.world
    if world.size == 1:
        return None
    if spread.terms is None:
        return _gathered_place(world, S1, S2)
    pairs = zip(S1.by_rank, spread.terms, strict=True)
    rows = [[examples * each for each in terms] for examples, terms in pairs]
    start = sum(S1.by_rank[: world.rank])
    return Place(sum(S1.by_rank), sum(S2.by_rank), _heads(rows, world.rank), start)


def _heads(rows: Sequence[Sequence[int]], rank: int) -> list[tuple[int, int]]:
    """Terms on all ranks, and on the ranks before this one, from those of every rank."""
    return [(sum(column), sum(column[:rank])) for column in zip(*rows, strict=True)]


def _gathered_place(world: Ranks, S1: Batch, S2: Batch) -> Place:
    """The same from what the ranks tell each other."""
    heads = [0.0 if S1.weightless else float(n) for n in head_counts(S1.passes).values()]
    rows = world.gather(Phase.EXAMPLES, [float(S1.examples), float(S2.examples), *heads])
    if len({len(row) for row in rows}) > 1:
        raise RankError(
            "The ranks' closures call different losses: "
            f"{', '.join(str(len(row) - 2) for row in rows)} kinds of loss calls. Call the same "
            "losses on all ranks."
        )
    counts = [[int(number) for number in row] for row in rows]
    statistics, fisher = (sum(row[n] for row in counts) for n in range(2))
    heads_of_all = _heads([row[2:] for row in counts], world.rank)
    start = sum(row[0] for row in counts[: world.rank])
    return Place(statistics, fisher, heads_of_all, start)


def update_curvature(
    settings: Settings,
    evaluation: Evaluation,
    some: CurvatureExamples,
    before: State,
    m: Measurement,
) -> tuple[Later[Curvature], CurrentInverse | None, Tensor]:
    """The moving averages with S₁ in them [§5], the inverse in use, and the generator's new state.

    Most inverses stay as they are until the next refresh: until then nothing of a step depends on the
    averages, which may be on their way between ranks.
    """
    network, S1, place = evaluation.network, some.statistics, some.place
    generator = torch.Generator(device=network.device)
    generator.set_state(before.generator)
    fisher, memory = settings.fisher, settings.step_size.long_memory
    remembered = 1.0 if memory is None else memory.statistics(m)
    decay = ema_decay(m.iteration, fisher.ema_decay, remembered)
    current = before.current
    update = None
    if current is not None:
        update = settings.inverse.between_refreshes(current.inverse, decay)
    curvature = begin_estimate(
        Sample(
            S1.passes,
            lambda part: some.around.for_statistics(cast(Pass, part)),
            factor=m.examples / (S1.examples if place is None else place.statistics),
            nothing=network.unused,
            world=evaluation.spread.world,
            place=place,
            weightless=S1.weightless,
        ),
        [unit.block for unit in network.units],
        fisher,
        generator,
        links=network.links,
        old=before.curvature,
        decay=decay,
        update=update,
    )
    if current is not None and update is not None:
        _ = curvature.value  # the update is part of what is summed over ranks
        current = replace(current, inverse=update.value())
    return curvature, current, generator.get_state()
