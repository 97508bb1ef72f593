"""What `kronfac bench refresh` measured, as tables and curves."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kronfac_experiments.bench import operations
from kronfac_experiments.bench.power_law import exponent
from kronfac_experiments.pages.document import Line, LogLogPlot, Table
from kronfac_experiments.report.tables import number

CHOLESKY = "block-diagonal, Cholesky"
EIGH = "block-diagonal, exact Tikhonov"
TRIDIAGONAL = "block-tridiagonal"
METHODS = (CHOLESKY, EIGH, TRIDIAGONAL)
PARTS = ("prepare", "damped")
PRODUCT = "product of two d × d matrices"


@dataclass(frozen=True)
class RefreshTrial:
    """One width: seconds of every repeat."""

    name: str
    width: int
    product: list[float]
    """Seconds of a product of two d × d matrices."""
    prepare: dict[str, list[float]]
    """By method."""
    damped: dict[str, list[float]]

    def ratio(self, part: str, method: str, layers: int) -> float:
        """In products a layer, the median of what the repeats have."""
        seconds: list[float] = getattr(self, part)[method]
        return median(s / p for s, p in zip(seconds, self.product, strict=True)) / layers


def tables(trials: Sequence[RefreshTrial], layers: int) -> tuple[Table, ...]:
    """In products, in milliseconds, and how fast it grows."""
    return _ratios(trials, layers), _milliseconds(trials), _exponents(trials)


def plots(trials: Sequence[RefreshTrial]) -> tuple[LogLogPlot, ...]:
    """Seconds by width."""
    widths = [trial.width for trial in trials]
    lines = [Line(name, widths, seconds) for name, seconds in _seconds(trials).items()]
    heading = "Seconds of a refresh, prepare and damped for one γ"
    return (LogLogPlot(heading, "width d", "seconds", lines),)


def _ratios(trials: Sequence[RefreshTrial], layers: int) -> Table:
    columns = ("method, part", *(trial.name for trial in trials), "operations")
    rows = [
        (
            f"{name}, {part}",
            *(f"{trial.ratio(part, name, layers):.2f}" for trial in trials),
            f"{_counted(name, part, layers):.2f}",
        )
        for name in METHODS
        for part in PARTS
    ]
    note = (
        "Last column: the same by operations, where a decomposition would be as fast as a product. The "
        "tridiagonal one leaves out columns that rounding would hide, so that it can be below it."
    )
    return Table("In products of two d × d matrices, a layer", columns, rows, note)


def _milliseconds(trials: Sequence[RefreshTrial]) -> Table:
    rows = [
        (PRODUCT, *(number(1e3 * median(t.product)) for t in trials)),
        *(
            (f"{name}, {part}", *(number(1e3 * median(getattr(t, part)[name])) for t in trials))
            for name in METHODS
            for part in PARTS
        ),
    ]
    columns = ("", *(trial.name for trial in trials))
    return Table("Milliseconds, median of the repeats", columns, rows)


def _exponents(trials: Sequence[RefreshTrial]) -> Table:
    widths = [trial.width for trial in trials]
    rows = [(name, f"{exponent(widths, y):.2f}", "3.00") for name, y in _seconds(trials).items()]
    note = "Least squares of log seconds on log d; prepare and damped for one γ together."
    return Table("Exponent in d", ("", "measured", "operations"), rows, note)


def _seconds(trials: Sequence[RefreshTrial]) -> dict[str, list[float]]:
    return {
        **{name: [_both(trial, name) for trial in trials] for name in METHODS},
        PRODUCT: [median(trial.product) for trial in trials],
    }


def _both(trial: RefreshTrial, method: str) -> float:
    return median(trial.prepare[method]) + median(trial.damped[method])


def _counted(method: str, part: str, layers: int) -> float:
    """Operations in products a layer: for d × d factors they do not depend on d."""
    shapes = [(1, 1)] * layers
    counts = {
        (CHOLESKY, "damped"): operations.refresh(shapes, tridiagonal=False),
        (EIGH, "prepare"): operations.exact_tikhonov(shapes),
        (TRIDIAGONAL, "damped"): operations.refresh(shapes, tridiagonal=True),
    }
    return counts.get((method, part), 0.0) / operations.product(1, 1, 1) / layers
