"""What `kronfac bench world` computed, as tables and a picture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from kronfac import WorldPlan
from kronfac.planning.limits import breaks_first, limits
from kronfac.planning.plan import readable
from kronfac_experiments.pages.document import Picture, Table
from kronfac_experiments.pages.drawn import BLACK, BLUE, GREEN, SKY, VERMILION, png

Plans = Mapping[str, Sequence[WorldPlan]]
"""By setting, each with growing numbers of processes."""
GB = 1e9
NOTE = (
    "Seconds of a step in the mean between refreshes, nothing overlapped; bytes that a process sends in a "
    "step; the most that a process holds. Balance: work of a refresh of the busiest process over the mean."
)


@dataclass(frozen=True)
class Measured:
    """One measured run, for the same model as `planned`, beside which it stands."""

    name: str
    processes: int
    seconds: float
    """Seconds of a step."""
    bytes: float
    """That a process sends in a step."""
    memory: float
    """Bytes that a process holds at its peak."""
    planned_seconds: float
    planned_bytes: float
    planned_memory: float


def tables(plans: Plans, measured: Sequence[Measured]) -> tuple[Table, ...]:
    """What breaks, one table for every setting, and what was measured."""
    found = [_breaks(plans)]
    for heading, own in plans.items():
        kinds = list(own[0].computation)
        messages = list(own[0].communication)
        seconds = [
            (
                f"{plan.world.processes:,}",
                *(_number(plan.computation[name]) for name in kinds),
                *(_number(plan.communication[name]) for name in messages),
                _number(plan.seconds),
            )
            for plan in own
        ]
        columns = ("processes", *kinds, *(f"sending {name}" for name in messages), "a step")
        found.append(Table(f"Seconds: {heading}", columns, seconds, NOTE))
        held = [
            (
                f"{plan.world.processes:,}",
                *(readable(round(plan.bytes[name])) for name in messages),
                readable(plan.memory.total),
                "yes" if plan.fits else "no",
                f"{plan.balance:.2f}",
                _number(plan.refresh),
                plan.dominates,
            )
            for plan in own
        ]
        columns = ("processes", *messages, "held", "fits", "balance", "a refresh, s", "longest")
        found.append(Table(f"Bytes and memory: {heading}", columns, held, NOTE))
    found.append(_measured(measured))
    return tuple(found)


def _breaks(plans: Plans) -> Table:
    rows = [
        (heading, f"{limit.processes:,}", limit.text)
        for heading, own in plans.items()
        for limit in limits(own)
    ]
    note = " ".join(f"{heading}: {breaks_first(own)}" for heading, own in plans.items())
    return Table(
        "What breaks, and from how many processes on", ("", "processes", "what"), rows, note
    )


def _measured(measured: Sequence[Measured]) -> Table:
    rows = [
        (
            run.name,
            f"{run.processes}",
            f"{_number(run.seconds)} / {_number(run.planned_seconds)}",
            f"{readable(round(run.bytes))} / {readable(round(run.planned_bytes))}",
            f"{readable(round(run.memory))} / {readable(round(run.planned_memory))}",
        )
        for run in measured
    ]
    columns = ("model", "processes", "seconds of a step", "bytes of a step", "memory")
    note = (
        "Measured / planned."
        if rows
        else "Not measured yet: `--measured FILE.json` puts runs here."
    )
    return Table("Beside measured runs", columns, rows, note)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def picture(plans: Plans) -> Picture:
    """Seconds of a step above, memory below, a column for every setting."""
    figure = Figure(figsize=(4.2 * len(plans), 7.0), layout="constrained")
    panels = figure.subplots(2, len(plans), squeeze=False, sharey="row", sharex=True)
    for column, (heading, own) in enumerate(plans.items()):
        x = [plan.world.processes for plan in own]
        above, below = panels[0][column], panels[1][column]
        lines = {
            "a step": ([p.seconds for p in own], BLACK, "o-"),
            "gradient": ([p.computation["gradient"] for p in own], BLUE, "s--"),
            "K-FAC's own computing": (
                [sum(p.computation.values()) - p.computation["gradient"] for p in own],
                GREEN,
                "^-.",
            ),
            "sending": ([sum(p.communication.values()) for p in own], VERMILION, "x-"),
        }
        for label, (y, colour, style) in lines.items():
            shown = [(a, b) for a, b in zip(x, y, strict=True) if b > 0]
            above.loglog(*zip(*shown, strict=True), style, color=colour, label=label, markersize=4)
        below.loglog(
            x, [p.memory.total / GB for p in own], "o-", color=BLACK, label="peak", markersize=4
        )
        below.loglog(
            x, [p.memory.state / GB for p in own], "s--", color=BLUE, label="state", markersize=4
        )
        below.loglog(
            x,
            [p.memory.refresh / GB for p in own],
            "^-.",
            color=SKY,
            label="a refresh, besides",
            markersize=4,
        )
        if own[0].world.memory is not None:
            below.axhline(own[0].world.memory / GB, color=VERMILION, linestyle=":", label="limit")
        above.set_title(heading, fontsize=9)
        below.set_xlabel("processes", fontsize=8)
        for axes, label in ((above, "seconds"), (below, "GB of a process")):
            axes.set_ylabel(label, fontsize=8)
            axes.set_xticks(x[::2], [f"{count}" for count in x[::2]])
            axes.minorticks_off()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=30))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
            axes.tick_params(labelsize=7)
            axes.grid(True, alpha=0.25)
            axes.legend(fontsize=7)
    description = "Seconds of a step and memory of a process by the number of processes."
    return Picture("By the number of processes", description, png(figure))
