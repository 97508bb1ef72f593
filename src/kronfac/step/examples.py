"""The curvature of a step: the examples that it is taken on, and the moving averages [MG15 §5, §8]."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from kronfac.control import Measurement
from kronfac.curvature import Curvature, ema_decay
from kronfac.curvature.estimate import Sample, estimate, head_counts
from kronfac.errors import RankError
from kronfac.linearize import linearize
from kronfac.record import Batch, sizes, subsets
from kronfac.settings import (
    FISHER_FRACTION,
    LEAST_EXAMPLES,
    LEAST_ROWS,
    STATISTICS_FRACTION,
    First,
    Intervals,
    Settings,
)
from kronfac.step.evaluation import Evaluation
from kronfac.step.state import CurrentInverse, State

SUBSET_SEEDS = 1_000_003
"""Iterations until the seeds of the subsets repeat those of another seed."""


@dataclass(frozen=True)
class CurvatureExamples:
    """The examples that the curvature of a step is taken on."""

    statistics: Batch
    """S₁."""
    fisher: Batch
    """S₂."""
    statistics_total: int
    """Examples of S₁ on all ranks."""
    fisher_total: int
    """Examples of S₂ on all ranks."""
    start: int = 0
    """Examples of S₁ on the ranks before this one."""
    heads: Sequence[tuple[int, int]] | None = None
    """For every kind of loss call on S₁: terms on all ranks, and on those before this one."""


def choose_examples(
    settings: Settings, evaluation: Evaluation, m: Measurement
) -> CurvatureExamples:
    """S₁ ⊂ S₂: drawn anew in every step, or the first examples [§8]."""
    batch, portion = evaluation.batch, evaluation.portion
    terms = batch.most_terms + portion.terms_elsewhere
    intervals = settings.intervals
    fractions = shares(intervals, m.examples, terms, evaluation.network.convolutional)
    if batch.random and not batch.traced:
        # Statistics and J v have to see the same masks, which depend on the examples of a pass.
        fractions = fractions[1], fractions[1]
    generator = None
    chosen = intervals.statistics_fraction, intervals.fisher_fraction
    if not any(isinstance(fraction, First) for fraction in chosen):
        # A generator of its own, so that the targets' stream stays as it is; no state to be saved.
        generator = torch.Generator().manual_seed(SUBSET_SEEDS * settings.fisher.seed + m.iteration)
    counts = sizes(m.examples, *fractions)
    S1, S2 = subsets(
        evaluation.network, batch, counts, generator, start=portion.start, total=m.examples
    )
    return _over_ranks(evaluation, S1, S2)


def shares(
    intervals: Intervals, examples: int, terms: int, convolutional: bool
) -> tuple[float, float]:
    """τ₁ and τ₂ for a mini-batch of so many examples; its loss has more terms if they are sequences."""
    least = LEAST_EXAMPLES / examples
    if not convolutional:
        least = max(least, LEAST_ROWS / max(terms, examples))
    least = min(1.0, least)
    tau_1, tau_2 = intervals.statistics_fraction, intervals.fisher_fraction
    return (
        max(STATISTICS_FRACTION, least) if tau_1 is None else tau_1,
        max(FISHER_FRACTION, least) if tau_2 is None else tau_2,
    )


def _over_ranks(evaluation: Evaluation, S1: Batch, S2: Batch) -> CurvatureExamples:
    """The examples, and where this rank's are among those of all ranks."""
    world = evaluation.world
    terms = [0.0 if S1.weightless else float(n) for n in head_counts(S1.passes).values()]
    rows = world.gather([float(S1.examples), float(S2.examples), *terms], "examples")
    if len({len(row) for row in rows}) > 1:
        raise RankError(
            "The ranks' closures call different losses: "
            f"{', '.join(str(len(row) - 2) for row in rows)} kinds of loss calls. Call the same "
            "losses on all ranks."
        )
    before = [sum(column) for column in zip([0.0] * len(rows[0]), *rows[: world.rank], strict=True)]
    total = [sum(column) for column in zip(*rows, strict=True)]
    heads = [(int(n), int(start)) for n, start in zip(total[2:], before[2:], strict=True)]
    return CurvatureExamples(S1, S2, int(total[0]), int(total[1]), int(before[0]), heads)


def update_curvature(
    settings: Settings,
    evaluation: Evaluation,
    some: CurvatureExamples,
    before: State,
    m: Measurement,
) -> tuple[Curvature, CurrentInverse | None, Tensor]:
    """The moving averages with S₁ in them [§5], the inverse in use, and the generator's new state."""
    network, S1 = evaluation.network, some.statistics
    generator = torch.Generator(device=network.device)
    generator.set_state(before.generator)
    fisher, memory = settings.fisher, None if m.trusted else settings.step_rule.long_memory
    remembered = 1.0 if memory is None else memory.statistics(m)
    decay = ema_decay(m.iteration, fisher.ema_decay, remembered)
    current = before.current
    update = None
    if current is not None:
        update = settings.inverse.between_refreshes(current.inverse, decay)
    curvature = estimate(
        Sample(
            S1.passes,
            partial(linearize, network),
            factor=m.examples / some.statistics_total,
            nothing=network.unused,
            weightless=S1.weightless,
            padded=S1.weightless or evaluation.numbers.padded,
            world=evaluation.world,
            total=some.statistics_total,
            start=some.start,
            heads=some.heads,
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
        current = replace(current, inverse=update.value())
    return curvature, current, generator.get_state()
