"""What `kronfac bench scaling` measured, as tables and curves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from kronfac_experiments.bench.chain import Sizes
from kronfac_experiments.bench.peak_memory import Theory
from kronfac_experiments.bench.power_law import exponent
from kronfac_experiments.pages.document import Line, LogLogPlot, Table, spread
from kronfac_experiments.report.tables import number

MB = 1e6
COLUMNS = ("SGD ms", "K-FAC ms", "ratio", "counted", "peak MB", "theory MB", "activ. MB")
NOTE = (
    "K-FAC: an average step, put together from its parts as often as the settings have them done. Ratio: "
    "median (smallest – largest) of the rounds; counted: that of operations. Peak: of two steps that both "
    "search for γ, without the cases and what the process held before. Theory: 5 × parameters + factors "
    "+ 2 × inverses; activations, of one pass, come on top. Last rows: exponents by least squares of the "
    "logarithms, of what was measured and of operations and memory in theory over the same sizes."
)


@dataclass(frozen=True)
class Point:
    """A size of a sweep."""

    value: int
    """Value of what is swept."""
    sizes: Sizes
    theory: Theory


@dataclass(frozen=True)
class ScalingTrial:
    """One size."""

    name: str
    sizes: dict[str, int]
    sgd_seconds: float
    """Time of a step, median."""
    parts: dict[str, float]
    """Seconds of an average step by part."""
    ratios: list[float]
    """K-FAC over SGD, a round each."""
    sgd_operations: float
    operations: dict[str, float]
    peak_bytes: int
    theory: dict[str, int]

    @property
    def kfac_seconds(self) -> float:
        """Seconds of an average step."""
        return sum(self.parts.values())

    @property
    def kfac_operations(self) -> float:
        """Operations of an average step."""
        return sum(self.operations.values())


Sweeps = Mapping[str, Sequence[Point]]
Trials = Mapping[str, ScalingTrial]


def tables(sweeps: Sweeps, trials: Trials, left_out: Mapping[str, str]) -> tuple[Table, ...]:
    """One a sweep, with the exponents below; `left_out` says why by name."""
    first, *others = (_table(name, points, trials, left_out) for name, points in sweeps.items())
    return replace(first, note=NOTE), *others


def _table(
    name: str, points: Sequence[Point], trials: Trials, left_out: Mapping[str, str]
) -> Table:
    rows = []
    for point in points:
        trial = trials.get(str(point.sizes))
        missing = (left_out.get(str(point.sizes), "–"), *["–"] * (len(COLUMNS) - 1))
        cells = _cells(trial, point) if trial else missing
        rows.append((f"{point.value:,}", *cells))
    x, found = _measured(points, trials)
    measured = (
        [t.sgd_seconds for t in found],
        [t.kfac_seconds for t in found],
        [median(t.ratios) for t in found],
    )
    counted = (
        [t.sgd_operations for t in found],
        [t.kfac_operations for t in found],
        [t.kfac_operations / t.sgd_operations for t in found],
    )
    kfac, activations = (
        [p.theory.kfac for p in points if str(p.sizes) in trials],
        [p.theory.activations for p in points if str(p.sizes) in trials],
    )
    peaks = [t.peak_bytes for t in found]
    rows.append(("exponent", *(_fit(x, y) for y in measured), "", _fit(x, peaks), "", ""))
    rows.append(
        (
            "counted",
            *(_fit(x, y) for y in counted[:2]),
            "",
            _fit(x, counted[2]),
            "",
            _fit(x, kfac),
            _fit(x, activations),
        )
    )
    return Table(f"By {name}", (name, *COLUMNS), rows)


def _cells(trial: ScalingTrial, point: Point) -> tuple[str, ...]:
    return (
        number(1e3 * trial.sgd_seconds),
        number(1e3 * trial.kfac_seconds),
        spread(trial.ratios, lambda ratio: f"{ratio:.2f}"),
        f"{trial.kfac_operations / trial.sgd_operations:.2f}",
        number(trial.peak_bytes / MB),
        number(point.theory.kfac / MB),
        number(point.theory.activations / MB),
    )


def _fit(x: Sequence[float], y: Sequence[float]) -> str:
    return f"{exponent(x, y):.2f}" if len(set(x)) > 1 else "–"


def _measured(points: Sequence[Point], trials: Trials) -> tuple[list[int], list[ScalingTrial]]:
    pairs = [(p.value, trials[str(p.sizes)]) for p in points if str(p.sizes) in trials]
    return [value for value, _ in pairs], [trial for _, trial in pairs]


def plots(sweeps: Sweeps, trials: Trials) -> tuple[LogLogPlot, ...]:
    """Seconds and memory, a plot a sweep each."""
    drawn = []
    for name, points in sweeps.items():
        x, found = _measured(points, trials)
        lines = [
            Line("SGD", x, [t.sgd_seconds for t in found]),
            Line("K-FAC", x, [t.kfac_seconds for t in found]),
            Line(
                "K-FAC at SGD's speed: operations",
                x,
                [_at_sgd_speed(t) for t in found],
                dashed=True,
            ),
        ]
        drawn.append(LogLogPlot(f"Seconds of a step by {name}", name, "seconds", lines))
        own = [p for p in points if str(p.sizes) in trials]
        memory = [
            Line("K-FAC at its peak", x, [t.peak_bytes / MB for t in found]),
            Line("theory", x, [p.theory.kfac / MB for p in own], dashed=True),
            Line(
                "theory and activations",
                x,
                [(p.theory.kfac + p.theory.activations) / MB for p in own],
                dashed=True,
            ),
        ]
        drawn.append(LogLogPlot(f"Memory by {name}", name, "MB", memory))
    return tuple(drawn)


def _at_sgd_speed(trial: ScalingTrial) -> float:
    """Seconds that the operations would take at the pace of SGD's."""
    return trial.kfac_operations / trial.sgd_operations * trial.sgd_seconds
