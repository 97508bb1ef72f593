"""Who got where in equal seconds, and how soon it was where AdamW with a cosine schedule ends.

The target of a seed is what that AdamW reached with the same seed: its last training loss, or its best
validation loss. Steps and seconds to it are compared seed by seed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kronfac_experiments.bench.race.networks.network_race import NetworkRace
from kronfac_experiments.bench.race.networks.racers import FIELD, REFERENCE, Racer
from kronfac_experiments.bench.race.networks.trials import (
    SECONDS,
    STEP,
    Measure,
    NetworkTrial,
)


@dataclass(frozen=True)
class Reached:
    """Steps and seconds to the reference's result, seed by seed; None where it was not reached."""

    steps: list[float | None]
    seconds: list[float | None]
    steps_ratio: list[float | None]
    """Over the reference's steps to the same value."""
    seconds_ratio: list[float | None]


@dataclass(frozen=True)
class Score:
    """A racer on a problem: a number for each seed."""

    racer: Racer
    lr: float | None
    on_the_edge: bool
    """Whether its rate is the least or most that was tried."""
    batch: int
    steps: list[float]
    training: list[float]
    """Loss at the end."""
    validation: list[float]
    """Loss at best."""
    metric: list[float]
    """At best."""
    to_training: Reached | None
    """None without a reference."""
    to_validation: Reached | None
    failed: int
    """Seeds that ended early."""


def scores_of(race: NetworkRace) -> list[Score]:
    """Scores of everyone that has run."""
    reference = race.found("race", REFERENCE)
    scores = []
    for racer in (racer for racer in FIELD if racer in race.racers):
        trials = race.found("race", racer)
        if not trials:
            continue
        lr = trials[0].lr
        scores.append(
            Score(
                racer,
                lr,
                lr is not None and lr in (min(race.rates(racer)), max(race.rates(racer))),
                trials[0].batch,
                [float(t.steps) for t in trials],
                [t.last("training loss") for t in trials],
                [t.best("validation loss") for t in trials],
                [t.best("validation metric") for t in trials],
                _reached(trials, reference, "training loss"),
                _reached(trials, reference, "validation loss"),
                sum(bool(t.message) for t in trials),
            )
        )
    return scores


def _reached(
    trials: Sequence[NetworkTrial], reference: Sequence[NetworkTrial], measure: Measure
) -> Reached | None:
    pairs = [(own, other) for own in trials for other in reference if own.seed == other.seed]
    if not pairs:
        return None
    found: dict[int, list[float | None]] = {STEP: [], SECONDS: []}
    ratios: dict[int, list[float | None]] = {STEP: [], SECONDS: []}
    for own, other in pairs:
        target = (
            other.last(measure) if measure == "training loss" else other.best("validation loss")
        )
        for axis in (STEP, SECONDS):
            mine = own.reaches(measure, target, axis) if math.isfinite(target) else None
            theirs = other.reaches(measure, target, axis) if math.isfinite(target) else None
            found[axis].append(mine)
            ratios[axis].append(mine / theirs if mine is not None and theirs else None)
    return Reached(found[STEP], found[SECONDS], ratios[STEP], ratios[SECONDS])


def middle(values: Sequence[float | None]) -> float | None:
    """The median, where what was not reached counts as ∞; None if that is what it is."""
    found = median(math.inf if value is None else value for value in values)
    return found if math.isfinite(found) else None
