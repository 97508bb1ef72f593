"""What `kronfac bench step` measured, as tables and bars."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median

from kronfac_experiments.pages.document import BarPlot, Table


@dataclass(frozen=True)
class StepTrial:
    """One inverse at one mini-batch size."""

    name: str
    inverse: str
    batch: int
    sgd_seconds: list[float]
    """Mean of a step, a repeat each."""
    kfac_seconds: list[float]
    parts: dict[str, float]
    """Seconds of an average step by part, over all repeats."""
    operations: dict[str, float]
    """Operations of an average step by part."""
    sgd_operations: float

    @property
    def ratios(self) -> list[float]:
        """A repeat each."""
        return [k / s for k, s in zip(self.kfac_seconds, self.sgd_seconds, strict=True)]


def tables(trials: Sequence[StepTrial]) -> tuple[Table, ...]:
    """The ratio, then its parts in milliseconds and in steps of SGD."""
    return _ratios(trials), _milliseconds(trials), _shares(trials)


def plots(trials: Sequence[StepTrial]) -> tuple[BarPlot, ...]:
    """The parts, measured and counted."""
    measured = [(t.name, {_words(p): _measured(t, p) for p in _parts(trials)}) for t in trials]
    counted = [(t.name, {_words(p): _counted(t, p) for p in _parts(trials)}) for t in trials]
    return (
        BarPlot("A K-FAC step by part, measured", "steps of SGD", measured),
        BarPlot("The same, counted in operations", "steps of SGD", counted),
    )


def _ratios(trials: Sequence[StepTrial]) -> Table:
    columns = (
        "", "step / SGD step, median", "smallest – largest", "operations / SGD's", "SGD, ms",
        "K-FAC, ms",
    )  # fmt: skip
    rows = [
        (
            trial.name,
            f"{median(trial.ratios):.2f}",
            f"{min(trial.ratios):.2f} – {max(trial.ratios):.2f}",
            f"{sum(trial.operations.values()) / trial.sgd_operations:.2f}",
            f"{1e3 * median(trial.sgd_seconds):.1f}",
            f"{1e3 * median(trial.kfac_seconds):.1f}",
        )
        for trial in trials
    ]
    note = (
        "Operations: matrix products and decompositions of an average step, counted from the shapes, "
        "with all γ of a search and no column of the tridiagonal correction dropped."
    )
    return Table("A K-FAC step over one of SGD", columns, rows, note)


def _milliseconds(trials: Sequence[StepTrial]) -> Table:
    rows = [
        (_words(part), *(f"{1e3 * trial.parts.get(part, 0.0):.1f}" for trial in trials))
        for part in _parts(trials)
    ]
    columns = ("part", *(trial.name for trial in trials))
    return Table("Milliseconds of a K-FAC step by part", columns, rows, "Mean over all steps.")


def _shares(trials: Sequence[StepTrial]) -> Table:
    rows = [
        (_words(part), *(f"{_measured(t, part):.3f} ({_counted(t, part):.3f})" for t in trials))
        for part in _parts(trials)
    ]
    note = "Seconds of the part over those of a step of SGD; in brackets the same of operations."
    columns = ("part", *(trial.name for trial in trials))
    return Table("Each part in steps of SGD, measured (counted)", columns, rows, note)


def _measured(trial: StepTrial, part: str) -> float:
    return trial.parts.get(part, 0.0) / mean(trial.sgd_seconds)


def _counted(trial: StepTrial, part: str) -> float:
    return trial.operations.get(part, 0.0) / trial.sgd_operations


def _parts(trials: Sequence[StepTrial]) -> list[str]:
    return list(dict.fromkeys(part for trial in trials for part in trial.parts))


def _words(part: str) -> str:
    return part.replace("_", " ")
