"""The numbers in words: tables for the terminal, the page and the Markdown file."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as TerminalTable

from kronfac.experiments.bench.ordinary.config import LEARNING_RATES, TUNING_SEED, OrdinaryConfig
from kronfac.experiments.bench.ordinary.problems import PROBLEMS
from kronfac.experiments.bench.ordinary.run import SLICE
from kronfac.experiments.bench.ordinary.score import FLOOR, Line, Side, summary
from kronfac.experiments.bench.ordinary.trials import ADAMW_NAME, Trials, best_rate
from kronfac.experiments.progress import number

DETAIL = "least – most"
"""Heading of the columns that a terminal has no room for."""


@dataclass(frozen=True)
class Table:
    """Cells under headings."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str


def loss_table(lines: Sequence[Line]) -> Table:
    """What the comparison is about."""
    headings = (
        "problem",
        "K-FAC",
        DETAIL,
        "AdamW",
        DETAIL,
        "lower",
        "ratio",
        "lr",
        "K-FAC's trouble",
    )
    rows = []
    for line in lines:
        edge = " !" if line.lr in (LEARNING_RATES[0], LEARNING_RATES[-1]) else ""
        ratio = f"{line.ratio:.3g}" if math.isfinite(line.ratio) else "–"
        losses = (*_losses(line.kfac), *_losses(line.adamw))
        rest = (line.verdict, ratio, f"{line.lr:g}{edge}", _trouble(line.kfac))
        rows.append((line.problem, *losses, *rest))
    note = (
        f"Over all training cases, median of the seeds. Ratio: AdamW's over K-FAC's, above 1 where K-FAC's "
        f"is lower; two below {FLOOR:g} tie. lr: AdamW's, with ! where it is the first or last of those "
        "tried. Diverged: ended above the loss at the start, or not finite; rose: was above it on the way."
    )
    return Table("Training loss at the end", headings, rows, note)


def validation_table(lines: Sequence[Line]) -> Table:
    """What the minimisation is good for, and how many steps it took."""
    headings = (
        "problem", "K-FAC", "at best", "AdamW", "at best", "K-FAC's steps", "AdamW's steps"
    )  # fmt: skip
    rows = []
    for line in lines:
        unit = "" if PROBLEMS[line.problem].error_name == "mean squared error" else " %"
        errors = [_error(e, unit) for s in (line.kfac, line.adamw) for e in (s.error, s.best_error)]
        rows.append((line.problem, *errors, f"{line.kfac.steps:,.0f}", f"{line.adamw.steps:,.0f}"))
    note = (
        "In % of the held-out cases misclassified, or as mean squared error of standardised targets; at "
        "best: at the evaluation where it was lowest. Medians of the seeds."
    )
    return Table("Validation error at the end", headings, rows, note)


def tuning_table(lines: Sequence[Line], trials: Trials) -> Table:
    """AdamW's loss at the end by learning rate."""
    rows = []
    for line in lines:
        best = best_rate(line.problem, trials)
        ends = {lr: trials[line.problem, ADAMW_NAME, lr, TUNING_SEED].end for lr in LEARNING_RATES}
        cells = (f"{_loss(end)}{' *' if lr == best else ''}" for lr, end in ends.items())
        rows.append((line.problem, *cells))
    headings = ("problem", *(f"{lr:g}" for lr in LEARNING_RATES))
    note = f"Training loss at the end from seed {TUNING_SEED}; * is the learning rate taken."
    return Table("AdamW's learning rates", headings, rows, note)


def show(lines: Sequence[Line], console: Console) -> None:
    """In the terminal."""
    for table in (loss_table(lines), validation_table(lines)):
        shown = [k for k, heading in enumerate(table.headings) if heading != DETAIL]
        drawn = TerminalTable(
            *(table.headings[k] for k in shown), title=table.title, title_justify="left"
        )
        for row in table.rows:
            drawn.add_row(*(row[k] for k in shown))
        console.print(drawn)
        console.print(table.note)
    console.print(summary(lines))


def settings(config: OrdinaryConfig) -> str:
    """In words."""
    return (
        f"{config.duration:g} s of optimiser time a run, {config.starts} seed(s) from 0, "
        f"{config.threads} thread(s), float32 on the CPU. K-FAC: KFAC(model, loss), all arguments at their "
        "defaults. AdamW: PyTorch's defaults but for weight_decay 0, so that the training loss is what "
        f"both minimise, and for the learning rate: of {', '.join(f'{lr:g}' for lr in LEARNING_RATES)} "
        f"the one with the lowest training loss after as many seconds from seed {TUNING_SEED}. The two "
        f"runs of a seed start from the same parameters and take turns of {SLICE:g} s, as do the runs of "
        "the learning rates. Only steps are on the clock: no drawing of mini-batches, no evaluating. "
        "Epochs of shuffled mini-batches, the last, smaller one kept; PyTorch's initial parameters; a "
        "third of the cases held out; inputs, and the targets of regressions, standardised by the "
        "training cases."
    )


def _losses(side: Side) -> tuple[str, str]:
    return _loss(side.loss), f"{_loss(side.least)} – {_loss(side.most)}"


def _loss(loss: float) -> str:
    return "not finite" if math.isinf(loss) else f"{loss:.3g}"


def _error(error: float, unit: str) -> str:
    return "not finite" if math.isinf(error) else f"{number(round(error, 4))}{unit}"


def _trouble(side: Side) -> str:
    kinds = {"diverged": side.diverged, "rose": side.rose}
    return ", ".join(f"{count} of {side.runs} {kind}" for kind, count in kinds.items() if count)
