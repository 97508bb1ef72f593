"""What `kronfac bench starts` found."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kronfac_experiments.pages.document import Table, spread
from kronfac_experiments.progress import number

DEFAULT = "no λ₀"


@dataclass(frozen=True)
class StartTrial:
    """One run."""

    name: str
    problem: str
    inverse: str
    start: str
    seed: int
    targets: list[float]
    reached: list[dict[str, float]] = field(default_factory=list)
    """Target, cases, iterations, seconds and mini-batch, in the order of the targets."""
    cases: int = 0
    error: float | None = None
    """The last one."""
    first_lambda: float | None = None
    """λ after the first step."""
    settled_lambda: float | None = None
    """λ after twenty."""
    taken_back: int = 0
    """Steps."""
    message: str = ""
    """Why it ended early."""

    def to(self, target: float, what: str) -> float:
        """Cases, iterations or seconds; infinite for what was not reached."""
        found = (row[what] for row in self.reached if row["target"] == target)
        return next(found, math.inf)


def tables(trials: Sequence[StartTrial]) -> list[Table]:
    """Cases to each target, then all runs."""
    found = []
    for target in dict.fromkeys((t.problem, target) for t in trials for target in t.targets):
        own = [t for t in trials if t.problem == target[0]]
        found.append(_cases(target[1], own))
    return [*found, _runs(trials)]


def _cases(target: float, trials: Sequence[StartTrial]) -> Table:
    starts = list(dict.fromkeys(t.start for t in trials))
    rows = []
    for inverse in dict.fromkeys(t.inverse for t in trials):
        of = {s: [t for t in trials if (t.inverse, t.start) == (inverse, s)] for s in starts}
        medians = {s: median(t.to(target, "cases") for t in runs) for s, runs in of.items() if runs}
        best = min(medians.values())
        worst = max(medians.values()) / best if math.isfinite(best) else math.nan
        rows.append(
            [
                inverse.replace("_", "-"),
                *(_spread([t.to(target, "cases") for t in of[s]]) for s in starts),
                "not reached" if not math.isfinite(worst) else f"{worst:.2f}",
            ]
        )
    return Table(
        heading=f"Cases to training error {target:g} on {trials[0].problem}",
        columns=["inverse", *starts, "most / fewest"],
        rows=rows,
        note="Median over the seeds, with the smallest and the largest; trial evaluations are counted.",
    )


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return _count(values[0]) if len(values) == 1 else spread(values, _count)


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "–"


def _stood(trial: StartTrial) -> str:
    """Where a run was given up."""
    return "" if trial.error is None else f"stood at {trial.error:.4g} after {trial.cases:,} cases"


def _runs(trials: Sequence[StartTrial]) -> Table:
    rows = []
    for trial in trials:
        for target in trial.targets:
            row = next((r for r in trial.reached if r["target"] == target), None)
            numbers = ["–"] * 4
            if row is not None:
                numbers = [
                    f"{row[what]:,.0f}" for what in ("cases", "iterations", "seconds", "batch")
                ]
            rows.append(
                [
                    trial.name,
                    f"{target:g}",
                    *numbers,
                    number(trial.first_lambda),
                    number(trial.settled_lambda),
                    str(trial.taken_back),
                    trial.message or ("" if row is not None else _stood(trial)),
                ]
            )
    return Table(
        heading="Every run",
        columns=[
            "run",
            "error",
            "cases",
            "iterations",
            "seconds",
            "last m",
            "λ after 1",
            "λ after 20",
            "taken back",
            "",
        ],
        rows=rows,
        note="Seconds are of optimiser time and depend on what else the machine did.",
        detail=True,
    )
