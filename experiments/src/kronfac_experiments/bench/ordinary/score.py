"""Who ends with the lower training loss, problem by problem."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from kronfac_experiments.bench.ordinary.trials import (
    ADAMW_NAME,
    KFAC_NAME,
    Trial,
    Trials,
    best_rate,
)

FLOOR = 1e-10
"""Below it a problem is solved; float32 outputs mean little more, and two that are there tie."""
Verdict = Literal["K-FAC", "AdamW", "tie"]


@dataclass(frozen=True)
class Side:
    """An optimizer on a problem: medians over the seeds, with the least and the most of the losses."""

    loss: float
    least: float
    most: float
    error: float
    """Validation error at the end."""
    best_error: float
    """Validation error at the evaluation where it was lowest, seed by seed."""
    steps: float
    diverged: int
    """Seeds that failed, or ended with a loss that is not finite or above the one at the start."""
    rose: int
    """Other seeds whose loss was above the one at the start on the way."""
    runs: int


@dataclass(frozen=True)
class Line:
    """A line of the table."""

    problem: str
    lr: float
    """AdamW's."""
    kfac: Side
    adamw: Side

    @property
    def verdict(self) -> Verdict:
        """Who has the lower loss."""
        one, other = self.kfac.loss, self.adamw.loss
        if max(one, other) < FLOOR or one == other:
            return "tie"
        return "K-FAC" if one < other else "AdamW"

    @property
    def ratio(self) -> float:
        """AdamW's loss over K-FAC's, neither taken below the floor; NaN if both diverged."""
        one, other = (max(loss, FLOOR) for loss in (self.kfac.loss, self.adamw.loss))
        return math.nan if math.inf == one == other else other / one


def lines_of(problems: Sequence[str], trials: Trials, seeds: int) -> list[Line]:
    """A line for each of the problems."""
    lines = []
    for problem in problems:
        lr = best_rate(problem, trials)
        lines.append(
            Line(
                problem,
                lr,
                kfac=side_of(runs_of(problem, KFAC_NAME, None, trials, seeds)),
                adamw=side_of(runs_of(problem, ADAMW_NAME, lr, trials, seeds)),
            )
        )
    return lines


def runs_of(
    problem: str, optimizer: str, lr: float | None, trials: Trials, seeds: int
) -> list[Trial]:
    """A trial a seed."""
    return [trials[problem, optimizer, lr, seed] for seed in range(seeds)]


def side_of(trials: Sequence[Trial]) -> Side:
    """Medians over the trials, a seed each."""
    ends = [trial.end for trial in trials]
    diverged = [trial for trial in trials if not trial.end <= trial.losses[0]]
    rose = [trial for trial in trials if trial not in diverged and _rose(trial)]
    return Side(
        loss=median(ends),
        least=min(ends),
        most=max(ends),
        error=_median(trials, lambda errors: errors[-1]),
        best_error=_median(trials, min),
        steps=median(trial.steps for trial in trials),
        diverged=len(diverged),
        rose=len(rose),
        runs=len(trials),
    )


def _median(trials: Sequence[Trial], of: Callable[[list[float]], float]) -> float:
    errors = [[math.inf if e is None else e for e in t.validation_error] for t in trials]
    return median(of(column) for column in errors)


def _rose(trial: Trial) -> bool:
    return max(trial.losses) > trial.losses[0]


def summary(lines: Sequence[Line]) -> str:
    """Who won how often, in a sentence or two."""
    won = {name: sum(line.verdict == name for line in lines) for name in ("K-FAC", "AdamW")}
    tied = [line for line in lines if line.verdict == "tie"]
    lower = sum(line.kfac.loss < line.adamw.loss for line in tied)
    ties = f"{len(tied)} tied" + (f" (K-FAC's is the lower number in {lower})" if tied else "")
    runs = sum(line.kfac.runs for line in lines)
    diverged = sum(line.kfac.diverged for line in lines)
    rose = sum(line.kfac.rose for line in lines)
    return (
        f"Lower training loss at the end: K-FAC on {won['K-FAC']} of {len(lines)} problems, AdamW on "
        f"{won['AdamW']}, {ties}. Of {runs} runs with K-FAC {diverged} diverged, and "
        f"{rose} more had a loss above the first one on the way."
    )
