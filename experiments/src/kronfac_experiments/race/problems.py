"""The table of problems, in four groups: networks, small, physics and autoencoders."""

from collections.abc import Sequence
from functools import cache

import torch

from kronfac_experiments.config import TrainConfig
from kronfac_experiments.race.equations import PHYSICS
from kronfac_experiments.race.network_problems import NETWORKS
from kronfac_experiments.race.problem import (
    ERROR,
    Metric,
    Problem,
    Split,
    misclassified,
    pixel_error,
    summed_error,
)
from kronfac_experiments.race.small_problems import SMALL
from kronfac_experiments.task import Task, load_task

EVALUATED = 10_000


@cache
def _task(name: str) -> Task:
    return load_task(TrainConfig(name))


def _paper(name: str, about: str, metric: Metric, metric_name: str, penalty: float) -> Problem:
    """A problem of `kronfac train`; its training loss is the error that the paper reports."""
    return Problem(
        name,
        about,
        lambda: Split(_task(name).train, _task(name).test),
        lambda: _task(name).make_model(torch.initial_seed()),
        lambda: _task(name).loss,
        metric,
        metric_name,
        batches=(500, 2000),
        evaluated=(EVALUATED, EVALUATED),
        penalty=penalty,
        loss_scale=100.0 if penalty else 1.0,
        error_for_loss=True,
        judged_by="training",
    )


AUTOENCODERS = (
    _paper("curves", "CURVES autoencoder of section 13", pixel_error, "squared error", 1e-5),
    _paper("mnist", "MNIST autoencoder of section 13", pixel_error, "squared error", 1e-5),
    _paper("faces", "FACES autoencoder of section 13", summed_error, "squared error", 5e-6),
    _paper("mnist16", "16 × 16 digits, classifier of section 3", misclassified, ERROR, 0.0),
)
GROUPS: dict[str, tuple[Problem, ...]] = {
    "networks": NETWORKS,
    "small": SMALL,
    "physics": PHYSICS,
    "autoencoders": AUTOENCODERS,
}
PROBLEMS = {problem.name: problem for group in GROUPS.values() for problem in group}


def group_of(problem: Problem) -> str:
    """The group that a problem belongs to."""
    names = {name: [p.name for p in group] for name, group in GROUPS.items()}
    return next(name for name, inside in names.items() if problem.name in inside)


def problems_named(names: Sequence[str]) -> tuple[Problem, ...]:
    """The problems or groups of these names, in the order of the table.

    Raises:
        ValueError: there is no such problem.
    """
    for name in names:
        if name not in (*GROUPS, *PROBLEMS):
            raise ValueError(
                f"PROBLEM is one of the groups {', '.join(GROUPS)} or of {', '.join(PROBLEMS)}; "
                f"got {name!r}."
            )
    return tuple(
        problem
        for group, problems in GROUPS.items()
        for problem in problems
        if group in names or problem.name in names
    )
