"""What `kronfac bench growth` measured, as tables and a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from kronfac_experiments.bench.growing import Kind, Size
from kronfac_experiments.bench.power_law import exponent, standard_error
from kronfac_experiments.pages.document import Picture, Table, spread
from kronfac_experiments.pages.drawn import BLACK, BLUE, VERMILION, png

SWEEPS: dict[str, tuple[Kind, str]] = {
    "Transformer by width": ("transformer", "width"),
    "Transformer by depth": ("transformer", "depth"),
    "Transformer by sequence length": ("transformer", "extent"),
    "Residual network by channels": ("resnet", "width"),
    "Residual network by depth": ("resnet", "depth"),
    "Residual network by image side": ("resnet", "extent"),
}
PHASES = ("closure", "statistics", "refresh")
MB = 1e6
NOTE = (
    "CPU time of the process. Median (smallest – largest) of the repeats. Memory: bytes that torch's "
    "allocator had given away at the peak of a phase of a step with a refresh, measured / planned. "
    "Exponents by least squares of the logarithms, with the standard error of the fit."
)


@dataclass(frozen=True)
class GrowthTrial:
    """One size."""

    name: str
    sgd: float
    """CPU seconds of a step, median of the repeats."""
    kfac: list[float]
    """Mean CPU seconds of a step, a repeat each."""
    ratios: list[float]
    """K-FAC over SGD, a repeat each."""
    sgd_operations: int
    operations: float
    measured: dict[str, int]
    """Bytes at the peak of every phase."""
    planned: dict[str, int]


Sweeps = Mapping[str, Sequence[tuple[int, Size]]]
Trials = Mapping[str, GrowthTrial]


def _found(own: Sequence[tuple[int, Size]], trials: Trials) -> list[tuple[int, GrowthTrial]]:
    return [(value, trials[str(size)]) for value, size in own if str(size) in trials]


def _fit(x: Sequence[float], y: Sequence[float]) -> str:
    return f"{exponent(x, y):.2f} ± {standard_error(x, y):.2f}" if len(set(x)) > 1 else "–"


def tables(sweeps: Sweeps, trials: Trials) -> tuple[Table, ...]:
    """Time with the exponents, and memory."""
    made: list[Table] = []
    for heading, own in sweeps.items():
        x, found = [v for v, _ in _found(own, trials)], [t for _, t in _found(own, trials)]
        rows = [
            (
                f"{value}",
                f"{1e3 * t.sgd:.0f}",
                spread([1e3 * s for s in t.kfac], lambda ms: f"{ms:.0f}"),
                spread(t.ratios, lambda ratio: f"{ratio:.2f}"),
                f"{t.operations / t.sgd_operations:.2f}",
                *(f"{t.measured[p] / MB:.1f} / {t.planned[p] / MB:.1f}" for p in PHASES),
                f"{_total(t):.2f}",
            )
            for value, t in zip(x, found, strict=True)
        ]
        fits: tuple[Sequence[float], ...] = (
            [t.sgd for t in found],
            [median(t.kfac) for t in found],
            [median(t.ratios) for t in found],
            [t.operations / t.sgd_operations for t in found],
            *([t.measured[p] for t in found] for p in PHASES),
        )
        rows.append(("exponent", *(_fit(x, y) for y in fits), ""))
        columns = ("", "SGD ms", "K-FAC ms", "ratio", "in operations")
        memory = tuple(f"{phase} MB" for phase in PHASES)
        note = "" if made else NOTE  # once is enough
        made.append(Table(heading, (*columns, *memory, "peak, planned / measured"), rows, note))
    return tuple(made)


def _total(trial: GrowthTrial) -> float:
    return max(trial.planned.values()) / max(trial.measured.values())


def picture(sweeps: Sweeps, trials: Trials) -> Picture:
    """CPU time above, memory below, a column for every sweep."""
    figure = Figure(figsize=(2.7 * len(sweeps), 5.2), layout="constrained")
    panels = figure.subplots(2, len(sweeps), squeeze=False)
    for column, (heading, own) in enumerate(sweeps.items()):
        x, found = [v for v, _ in _found(own, trials)], [t for _, t in _found(own, trials)]
        above, below = panels[0][column], panels[1][column]
        above.loglog(x, [1e3 * t.sgd for t in found], "s--", color=VERMILION, label="SGD")
        above.loglog(x, [1e3 * median(t.kfac) for t in found], "o-", color=BLUE, label="K-FAC")
        peaks = [max(t.measured.values()) / MB for t in found]
        planned = [max(t.planned.values()) / MB for t in found]
        below.loglog(x, peaks, "o-", color=BLUE, label="peak of a step")
        below.loglog(x, planned, "x:", color=BLACK, label="planned")
        above.set_title(heading, fontsize=8)
        for axes, label in ((above, "CPU ms of a step"), (below, "MB")):
            axes.set_ylabel(label, fontsize=8)
            axes.set_xticks(x, [str(value) for value in x])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=20))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axes.tick_params(labelsize=7)
            axes.grid(True, alpha=0.25)
            axes.legend(fontsize=6)
    description = "CPU time and peak memory of a step by size, a column for every sweep."
    return Picture("Growth", description, png(figure))
